# One source, many instruction sets: fulmen_cpu_kernels(NAME ... SOURCES ... TARGETS ...) compiles each source once a
# target into the namespace fulmen::cpu::<target>. dispatch.cpp chooses at run time.
set(FULMEN_CPU_FLAGS_generic "")
set(FULMEN_CPU_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2)
set(FULMEN_CPU_FLAGS_avx512 ${FULMEN_CPU_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mprefer-vector-width=512)
set(FULMEN_CPU_FLAGS_avx512_bf16 ${FULMEN_CPU_FLAGS_avx512} -mavx512bf16 -mavx512vnni)
set(FULMEN_CPU_FLAGS_amx ${FULMEN_CPU_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(FULMEN_CPU_TARGETS generic avx2 avx512 avx512_bf16 amx)
else()
  set(FULMEN_CPU_TARGETS generic)
endif()

function(fulmen_cpu_kernels library)
  cmake_parse_arguments(ARG "" "" "SOURCES;TARGETS" ${ARGN})
  foreach(target ${ARG_TARGETS})
    if(NOT target IN_LIST FULMEN_CPU_TARGETS)
      continue()
    endif()
    set(object ${library}_${target})
    while(TARGET ${object})  # the function may be called again for another group of sources
      string(APPEND object _more)
    endwhile()
    add_library(${object} OBJECT ${ARG_SOURCES})
    target_compile_definitions(${object} PRIVATE FULMEN_TARGET=${target} FULMEN_TARGET_NAME="${target}")
    set(optimise -O3)
    if(FULMEN_SANITIZE_FLAGS AND FULMEN_SANITIZE_KERNELS)
      set(optimise -O1)  # checks in unrolled loops take minutes to compile
    elseif(FULMEN_SANITIZE_FLAGS)
      get_target_property(options ${object} COMPILE_OPTIONS)
      list(REMOVE_ITEM options ${FULMEN_SANITIZE_FLAGS})
      set_target_properties(${object} PROPERTIES COMPILE_OPTIONS "${options}")
    endif()
    # GCC 12 warns of its own intrinsics (uninitialised by design) and of copies between 16-bit floats and their bits.
    target_compile_options(${object} PRIVATE ${FULMEN_CPU_FLAGS_${target}} ${optimise} -ffp-contract=off -fno-math-errno -Wno-psabi -Wno-uninitialized
                           -Wno-maybe-uninitialized -Wno-class-memaccess)
    target_include_directories(${object} PRIVATE ${PROJECT_SOURCE_DIR}/src)
    set_target_properties(${object} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${object}>)
  endforeach()
endfunction()
