# The Python extension fulmen._core. In a build tree the importable package is <build>/python/fulmen: the extension
# beside a link to python/fulmen/__init__.py, which finds the other Python files through that link.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module)
if(NOT Python_FOUND)
  message(STATUS "fulmen: no Python development files, the Python extension is left out")
  return()
endif()
execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir OUTPUT_STRIP_TRAILING_WHITESPACE
                OUTPUT_VARIABLE FULMEN_NANOBIND_DIR RESULT_VARIABLE FULMEN_NANOBIND_FAILED ERROR_QUIET)
if(FULMEN_NANOBIND_FAILED)
  message(STATUS "fulmen: ${Python_EXECUTABLE} has no nanobind, the Python extension is left out")
  return()
endif()
find_package(nanobind CONFIG REQUIRED PATHS ${FULMEN_NANOBIND_DIR} NO_DEFAULT_PATH)

file(GLOB FULMEN_BINDING_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/python/bindings/*.cpp)
nanobind_add_module(_core NB_STATIC NOMINSIZE ${FULMEN_BINDING_SOURCES})
target_include_directories(_core PRIVATE ${PROJECT_SOURCE_DIR}/python/bindings)
target_link_libraries(_core PRIVATE fulmen)
set(FULMEN_PACKAGE_DIR ${PROJECT_BINARY_DIR}/python/fulmen)
set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${FULMEN_PACKAGE_DIR})
file(MAKE_DIRECTORY ${FULMEN_PACKAGE_DIR})
file(CREATE_LINK ${PROJECT_SOURCE_DIR}/python/fulmen/__init__.py ${FULMEN_PACKAGE_DIR}/__init__.py SYMBOLIC)

# Only for the wheel: `cmake --install` without a component installs the C++ package alone.
install(TARGETS _core LIBRARY DESTINATION fulmen COMPONENT python EXCLUDE_FROM_ALL)
