# Adds the cuDNN executor to the target `fulmen`. Only headers are needed: cuda.h and cuda_runtime.h, cudnn.h, and
# cudnn-frontend's (its wheel nvidia-cudnn-frontend carries them). Without them the executor is built as one that says
# why it is unavailable. cudnn-frontend decides some questions by the cuDNN headers it is compiled with: those of 9.19
# are taken before the ones beside PyTorch (fp32's forward is accepted with 9.19's, refused with 9.26's).
set(FULMEN_CUDNN_DIR ${PROJECT_SOURCE_DIR}/src/executors/cudnn)
file(GLOB FULMEN_SITE_PACKAGES ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages)
if(Python_EXECUTABLE)  # its folders are also those of an isolated build's requirements
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import sys; print(';'.join(p for p in sys.path if p))"
                  OUTPUT_VARIABLE FULMEN_PYTHON_PATHS OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND FULMEN_SITE_PACKAGES ${FULMEN_PYTHON_PATHS})
endif()
set(FULMEN_NVIDIA_INCLUDES "")
foreach(site IN LISTS FULMEN_SITE_PACKAGES)
  list(APPEND FULMEN_NVIDIA_INCLUDES ${site}/nvidia/cudnn/include ${site}/nvidia/cu13/include
       ${site}/nvidia/cuda_runtime/include)
endforeach()
find_path(FULMEN_CUDA_INCLUDE NAMES cuda.h HINTS ${PROJECT_SOURCE_DIR}/.carry/cuda PATHS /usr/local/cuda/include
          ${FULMEN_NVIDIA_INCLUDES})
find_path(FULMEN_CUDA_RUNTIME_INCLUDE NAMES cuda_runtime.h HINTS ${PROJECT_SOURCE_DIR}/.carry/cuda PATHS
          /usr/local/cuda/include ${FULMEN_NVIDIA_INCLUDES})
find_path(FULMEN_CUDNN_INCLUDE NAMES cudnn.h HINTS ${PROJECT_SOURCE_DIR}/.carry/cudnn PATHS /usr/local/cuda/include
          ${FULMEN_NVIDIA_INCLUDES})
find_path(FULMEN_CUDNN_FRONTEND_INCLUDE NAMES cudnn_frontend.h HINTS ${PROJECT_SOURCE_DIR}/.carry/cudnn_frontend
          PATH_SUFFIXES include HINTS ${FULMEN_SITE_PACKAGES}/include ${FULMEN_SITE_PACKAGES})

set(FULMEN_WITHOUT_CUDNN_REASON "")
foreach(pair "FULMEN_CUDA_INCLUDE:cuda.h" "FULMEN_CUDA_RUNTIME_INCLUDE:cuda_runtime.h" "FULMEN_CUDNN_INCLUDE:cudnn.h"
             "FULMEN_CUDNN_FRONTEND_INCLUDE:cudnn_frontend.h (pip install nvidia-cudnn-frontend)")
  string(REPLACE ":" ";" pair "${pair}")
  list(GET pair 0 variable)
  list(GET pair 1 header)
  if(NOT ${variable} AND NOT FULMEN_WITHOUT_CUDNN_REASON)
    set(FULMEN_WITHOUT_CUDNN_REASON "built without ${header}")
  endif()
endforeach()
option(FULMEN_CUDNN "Build the cuDNN executor where its headers are found" ON)
if(NOT FULMEN_CUDNN)
  set(FULMEN_WITHOUT_CUDNN_REASON "switched off when Fulmen was built (FULMEN_CUDNN=OFF)")
endif()

target_sources(fulmen PRIVATE ${FULMEN_CUDNN_DIR}/options.cpp ${FULMEN_CUDNN_DIR}/problem.cpp
               ${FULMEN_CUDNN_DIR}/rules.cpp ${FULMEN_CUDNN_DIR}/known_faults.cpp ${FULMEN_CUDNN_DIR}/executor.cpp
               ${FULMEN_CUDNN_DIR}/plan_store.cpp ${FULMEN_CUDNN_DIR}/converter.cpp)
if(FULMEN_WITHOUT_CUDNN_REASON)
  message(STATUS "Fulmen: no cuDNN executor, ${FULMEN_WITHOUT_CUDNN_REASON}")
  target_sources(fulmen PRIVATE ${FULMEN_CUDNN_DIR}/without_cudnn.cpp)
  set_source_files_properties(${FULMEN_CUDNN_DIR}/without_cudnn.cpp PROPERTIES COMPILE_DEFINITIONS
                              "FULMEN_WITHOUT_CUDNN_REASON=\"${FULMEN_WITHOUT_CUDNN_REASON}\"")
else()
  message(STATUS "Fulmen: cuDNN executor with headers from ${FULMEN_CUDNN_INCLUDE}, ${FULMEN_CUDNN_FRONTEND_INCLUDE}")
  # The driver's stand-in, as bytes inside the library.
  set(stand_in_folder ${CMAKE_BINARY_DIR}/stand_in)
  file(MAKE_DIRECTORY ${stand_in_folder})
  add_custom_command(
    OUTPUT ${stand_in_folder}/stand_in.c
    COMMAND ${CMAKE_COMMAND} -DCUDA_HEADER=${FULMEN_CUDA_INCLUDE}/cuda.h -DOUTPUT=${stand_in_folder}/stand_in.c -P
            ${FULMEN_CUDNN_DIR}/stand_in.cmake
    DEPENDS ${FULMEN_CUDNN_DIR}/stand_in.cmake VERBATIM)
  add_custom_command(
    OUTPUT ${stand_in_folder}/libcuda_stand_in.so
    COMMAND ${CMAKE_C_COMPILER} -O1 -w -shared -fPIC -Wl,-soname,libcuda.so.1 -Wl,--strip-all -o
            ${stand_in_folder}/libcuda_stand_in.so ${stand_in_folder}/stand_in.c
    DEPENDS ${stand_in_folder}/stand_in.c VERBATIM)
  file(GENERATE OUTPUT ${stand_in_folder}/stand_in_data.cpp CONTENT
"asm(\".section .rodata\\n\"
    \".global fulmen_driver_stand_in, fulmen_driver_stand_in_end\\n\"
    \".balign 16\\nfulmen_driver_stand_in:\\n\"
    \".incbin \\\"${stand_in_folder}/libcuda_stand_in.so\\\"\\n\"
    \"fulmen_driver_stand_in_end:\\n.byte 0\\n.previous\\n\");
")
  set_source_files_properties(${stand_in_folder}/stand_in_data.cpp PROPERTIES OBJECT_DEPENDS
                              ${stand_in_folder}/libcuda_stand_in.so GENERATED TRUE)
  file(GLOB FULMEN_CUDNN_SOURCES CONFIGURE_DEPENDS ${FULMEN_CUDNN_DIR}/*.cpp)
  list(FILTER FULMEN_CUDNN_SOURCES EXCLUDE REGEX "/without_cudnn.cpp$")
  target_sources(fulmen PRIVATE ${FULMEN_CUDNN_SOURCES} ${stand_in_folder}/stand_in_data.cpp)
  set_source_files_properties(
    ${FULMEN_CUDNN_DIR}/graph.cpp PROPERTIES
    INCLUDE_DIRECTORIES "${FULMEN_CUDNN_FRONTEND_INCLUDE};${FULMEN_CUDNN_INCLUDE};${FULMEN_CUDA_RUNTIME_INCLUDE};${FULMEN_CUDA_INCLUDE}"
    COMPILE_OPTIONS "-O1;-w"
    COMPILE_DEFINITIONS NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING)
endif()

# Tests that need a GPU: built on request (ninja fulmen_gpu_tests), run by hand or by tools/gpu_run.sh.
file(GLOB FULMEN_GPU_TEST_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/gpu/*.cpp)
if(FULMEN_BUILD_TESTS AND FULMEN_GPU_TEST_SOURCES AND NOT FULMEN_WITHOUT_CUDNN_REASON)
  find_package(GTest REQUIRED)
  add_executable(fulmen_gpu_tests EXCLUDE_FROM_ALL ${FULMEN_GPU_TEST_SOURCES}
                 ${PROJECT_SOURCE_DIR}/tests/unit/executors/cudnn_cases.cpp)
  target_include_directories(fulmen_gpu_tests PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(fulmen_gpu_tests PRIVATE fulmen GTest::gtest GTest::gtest_main)
  # Runs on another machine than the one that built it.
  target_link_options(fulmen_gpu_tests PRIVATE -static-libstdc++ -static-libgcc)
  target_compile_definitions(fulmen_gpu_tests PRIVATE FULMEN_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
endif()
