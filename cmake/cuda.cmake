# Whether this build can have CUDA kernels. GRADWIRE_CUDA says what is wanted:
#   auto  try; where nvcc and the host compiler do not fit together, warn and go on without
#   on    as auto, but a failure ends the configuration
#   off   do not even look
# Sets GRADWIRE_CUDA_STATUS to one line that says what came of it, for `gradwire info`.
set(GRADWIRE_CUDA "auto" CACHE STRING "CUDA backend: auto, on or off")
set_property(CACHE GRADWIRE_CUDA PROPERTY STRINGS auto on off)

# Compiles a kernel once per compiler pair. A try_compile of CMake's would enable the language first, and that failing
# ends the configuration: exactly what `auto` must not do.
function(gradwire_try_nvcc nvcc status_variable works_variable)
  set(key "${nvcc} ${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_VERSION}")
  if(NOT "${GRADWIRE_CUDA_TRIED}" STREQUAL "${key}")
    set(folder "${CMAKE_BINARY_DIR}/CMakeFiles/gradwire_try_nvcc")
    file(WRITE "${folder}/probe.cu"
      "#include <cstdint>\n#include <vector>\n__global__ void probe(uint32_t* out) { out[threadIdx.x] = threadIdx.x; }\n"
      "int main() { std::vector<uint32_t> host(1); probe<<<1, 1>>>(host.data()); }\n")
    execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE about ERROR_QUIET)
    string(REGEX MATCH "release ([0-9.]+)" ignored "${about}")
    set(name "nvcc ${CMAKE_MATCH_1}")
    execute_process(
      COMMAND "${nvcc}" -std=c++17 -ccbin "${CMAKE_CXX_COMPILER}" -c "${folder}/probe.cu" -o "${folder}/probe.o"
      RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 120)
    file(WRITE "${folder}/output.txt" "${output}")
    if(failed)
      set(status "${name} does not compile with this host compiler, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
    else()
      set(status "${name} compiles, but this version has no CUDA kernels yet")
    endif()
    set(GRADWIRE_CUDA_TRIED "${key}" CACHE INTERNAL "nvcc and host compiler that were tried together")
    set(GRADWIRE_CUDA_TRIED_STATUS "${status}" CACHE INTERNAL "what came of it")
    if(failed)
      set(GRADWIRE_CUDA_TRIED_WORKS OFF CACHE INTERNAL "whether it worked")
    else()
      set(GRADWIRE_CUDA_TRIED_WORKS ON CACHE INTERNAL "whether it worked")
    endif()
  endif()
  set(${status_variable} "${GRADWIRE_CUDA_TRIED_STATUS}" PARENT_SCOPE)
  set(${works_variable} "${GRADWIRE_CUDA_TRIED_WORKS}" PARENT_SCOPE)
endfunction()

if(NOT GRADWIRE_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "GRADWIRE_CUDA is \"${GRADWIRE_CUDA}\", must be auto, on or off")
endif()

set(gradwire_cuda_works OFF)
if(GRADWIRE_CUDA STREQUAL "off")
  set(GRADWIRE_CUDA_STATUS "off by choice")
elseif(CMAKE_CROSSCOMPILING)
  set(GRADWIRE_CUDA_STATUS "off: cross-compiled")
else()
  find_program(GRADWIRE_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_PATH ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda)
  mark_as_advanced(GRADWIRE_NVCC)
  if(GRADWIRE_NVCC)
    gradwire_try_nvcc("${GRADWIRE_NVCC}" GRADWIRE_CUDA_STATUS gradwire_cuda_works)
  else()
    set(GRADWIRE_CUDA_STATUS "no nvcc found")
  endif()
endif()

if(GRADWIRE_CUDA STREQUAL "on" AND NOT gradwire_cuda_works)
  message(FATAL_ERROR "GRADWIRE_CUDA=on: ${GRADWIRE_CUDA_STATUS}")
elseif(GRADWIRE_NVCC AND NOT GRADWIRE_CUDA STREQUAL "off" AND NOT gradwire_cuda_works AND NOT CMAKE_CROSSCOMPILING)
  message(WARNING "CUDA: ${GRADWIRE_CUDA_STATUS}; going on without. The compiler's words are in "
    "${CMAKE_BINARY_DIR}/CMakeFiles/gradwire_try_nvcc/output.txt")
else()
  message(STATUS "CUDA: ${GRADWIRE_CUDA_STATUS}")
endif()
