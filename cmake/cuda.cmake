# The compilation of CUDA kernels. GRADWIRE_CUDA is
#   auto  build the kernels if nvcc, its runtime and the host compiler fit together; otherwise warn and continue
#   on    as auto, but a failure ends the configuration
#   off   do not look for nvcc
# nvcc's host compiler is CMAKE_CUDA_HOST_COMPILER if that is set, otherwise the compiler of everything else. They may differ:
# nvcc compiles kernels and nothing that needs the C++ library.
# Sets gradwire_cuda_works, and GRADWIRE_CUDA_STATUS to one line with the result, for `gradwire info`.
#
# nvcc is called by custom commands. Enabling CMake's CUDA language would end the configuration for any fault of the toolkit,
# and it requires the layout of a toolkit, which the wheels do not have
# (pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl; CUDACXX names the nvcc).
set(GRADWIRE_CUDA "auto" CACHE STRING "CUDA backend: auto, on or off")
set_property(CACHE GRADWIRE_CUDA PROPERTY STRINGS auto on off)

# Choose the architectures: CMAKE_CUDA_ARCHITECTURES if it is set (numbers, each with -real, -virtual or neither for both, or
# "native"), otherwise that of the GPU in this machine. Without a GPU the module will run on another machine, and the default
# is 80, 90 and 100 with PTX of 80, which a driver compiles for all other architectures.
function(gradwire_cuda_flags nvcc flags_variable)
  set(wanted "${CMAKE_CUDA_ARCHITECTURES}")
  set(problem "")
  if(NOT wanted OR wanted STREQUAL "native")
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      RESULT_VARIABLE failed OUTPUT_VARIABLE present ERROR_QUIET)
    set(native "")
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${present}")
      foreach(capability IN LISTS capabilities)
        string(REPLACE "." "" capability "${capability}")
        list(APPEND native "${capability}-real")
      endforeach()
      list(REMOVE_DUPLICATES native)
    endif()
    if(native)
      set(wanted "${native}")
    elseif(wanted)
      set(problem "CMAKE_CUDA_ARCHITECTURES is native, but nvidia-smi finds no GPU")
      set(wanted "")
    else()
      set(wanted "80" "90-real" "100-real")
    endif()
  endif()
  execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
  set(flags "")
  set(taken "")
  foreach(architecture IN LISTS wanted)
    string(REGEX REPLACE "-(real|virtual)$" "" number "${architecture}")
    if(NOT known MATCHES "compute_${number}\n")
      if(CMAKE_CUDA_ARCHITECTURES)
        set(problem "${GRADWIRE_CUDA_STATUS} knows no architecture ${number}")
      endif()
      continue()
    endif()
    list(APPEND taken "${architecture}")
    if(NOT architecture MATCHES "-virtual$")
      list(APPEND flags "-gencode=arch=compute_${number},code=sm_${number}")
    endif()
    if(NOT architecture MATCHES "-real$")
      list(APPEND flags "-gencode=arch=compute_${number},code=compute_${number}")
    endif()
  endforeach()
  list(JOIN taken ", " names)
  set(${flags_variable} "${flags}" PARENT_SCOPE)
  if(problem)
    set(GRADWIRE_CUDA_STATUS "${problem}" PARENT_SCOPE)
    set(gradwire_cuda_works OFF PARENT_SCOPE)
  else()
    set(GRADWIRE_CUDA_STATUS "${GRADWIRE_CUDA_STATUS}, built for ${names}" PARENT_SCOPE)
  endif()
endfunction()

# Compile a kernel and link a program with the runtime, once for these compilers. CMake's try_compile would enable the
# CUDA language.
function(gradwire_try_nvcc nvcc status_variable works_variable)
  set(key "${nvcc} ${GRADWIRE_CUDART} ${CMAKE_CUDA_HOST_COMPILER} ${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_VERSION}")
  if(NOT "${GRADWIRE_CUDA_TRIED}" STREQUAL "${key}")
    set(folder "${CMAKE_BINARY_DIR}/CMakeFiles/gradwire_try_nvcc")
    file(WRITE "${folder}/probe.cu"
      "#include <vector>\n__global__ void probe(unsigned* out) { out[threadIdx.x] = threadIdx.x; }\n"
      "int main() { probe<<<1, 1>>>(nullptr); }\n")
    execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE about ERROR_QUIET)
    string(REGEX MATCH "release ([0-9.]+)" ignored "${about}")
    set(release "${CMAKE_MATCH_1}")
    set(name "nvcc ${release}")
    set(works OFF)
    execute_process(
      COMMAND "${nvcc}" -std=c++17 -ccbin "${CMAKE_CUDA_HOST_COMPILER}" -c "${folder}/probe.cu" -o "${folder}/probe.o"
      RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 120)
    if(release AND release VERSION_LESS 12)
      set(status "${name} is too old, the kernels need 12.0")
    elseif(failed)
      set(status "${name} does not compile with the host compiler ${CMAKE_CUDA_HOST_COMPILER}")
    elseif(NOT GRADWIRE_CUDART OR NOT GRADWIRE_CUDA_INCLUDE)
      set(status "${name} compiles, but its runtime (cuda_runtime_api.h, libcudart_static.a) was not found")
    else()
      execute_process(
        COMMAND "${CMAKE_CXX_COMPILER}" "${folder}/probe.o" "${GRADWIRE_CUDART}" -lpthread -ldl -lrt -o "${folder}/probe"
        RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 120)
      if(failed)
        set(status "${name} compiles, but nothing links with ${GRADWIRE_CUDART}")
      else()
        set(status "${name}")
        set(works ON)
      endif()
    endif()
    file(WRITE "${folder}/output.txt" "${output}")
    set(GRADWIRE_CUDA_TRIED "${key}" CACHE INTERNAL "nvcc, runtime and host compiler of the last try")
    set(GRADWIRE_CUDA_TRIED_STATUS "${status}" CACHE INTERNAL "result of the last try")
    set(GRADWIRE_CUDA_TRIED_WORKS ${works} CACHE INTERNAL "whether the last try succeeded")
  endif()
  set(${status_variable} "${GRADWIRE_CUDA_TRIED_STATUS}" PARENT_SCOPE)
  set(${works_variable} "${GRADWIRE_CUDA_TRIED_WORKS}" PARENT_SCOPE)
endfunction()

if(NOT GRADWIRE_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "GRADWIRE_CUDA is \"${GRADWIRE_CUDA}\", must be auto, on or off")
endif()

if(NOT CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
set(gradwire_cuda_works OFF)
if(GRADWIRE_CUDA STREQUAL "off")
  set(GRADWIRE_CUDA_STATUS "off by choice")
elseif(CMAKE_CROSSCOMPILING)
  set(GRADWIRE_CUDA_STATUS "off: cross-compiled")
else()
  if(DEFINED ENV{CUDACXX})
    set(GRADWIRE_NVCC "$ENV{CUDACXX}" CACHE FILEPATH "the CUDA compiler")
  endif()
  find_program(GRADWIRE_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda)
  mark_as_advanced(GRADWIRE_NVCC)
  if(GRADWIRE_NVCC)
    # Ask the compiler for its folder, because the name on the path may be a link or a script.
    execute_process(COMMAND "${GRADWIRE_NVCC}" -dryrun -E -x cu /dev/null OUTPUT_VARIABLE words ERROR_VARIABLE words)
    string(REGEX MATCH "_HERE_=([^\n]+)" ignored "${words}")
    set(gradwire_cuda_root "${CMAKE_MATCH_1}/..")
    find_path(GRADWIRE_CUDA_INCLUDE cuda_runtime_api.h HINTS "${gradwire_cuda_root}"
      PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include)
    find_library(GRADWIRE_CUDART cudart_static HINTS "${gradwire_cuda_root}"
      PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib)
    mark_as_advanced(GRADWIRE_CUDA_INCLUDE GRADWIRE_CUDART)
    gradwire_try_nvcc("${GRADWIRE_NVCC}" GRADWIRE_CUDA_STATUS gradwire_cuda_works)
  else()
    set(GRADWIRE_CUDA_STATUS "no nvcc found")
  endif()
endif()

if(gradwire_cuda_works)
  gradwire_cuda_flags("${GRADWIRE_NVCC}" gradwire_cuda_architectures)
endif()
if(GRADWIRE_CUDA STREQUAL "on" AND NOT gradwire_cuda_works)
  message(FATAL_ERROR "GRADWIRE_CUDA=on: ${GRADWIRE_CUDA_STATUS}")
elseif(GRADWIRE_NVCC AND NOT GRADWIRE_CUDA STREQUAL "off" AND NOT gradwire_cuda_works AND NOT CMAKE_CROSSCOMPILING)
  message(WARNING "CUDA: ${GRADWIRE_CUDA_STATUS}; continuing without CUDA. The output of the compiler is in "
    "${CMAKE_BINARY_DIR}/CMakeFiles/gradwire_try_nvcc/output.txt")
else()
  message(STATUS "CUDA: ${GRADWIRE_CUDA_STATUS}")
endif()

# Every kernel gives the bits of the CPU: no fused multiply-add, subnormals kept, divisions and square roots correctly rounded.
# The last three are defaults of nvcc, stated here because the results depend on them.
if(gradwire_cuda_works)
  set(gradwire_nvcc_flags -std=c++17 -O3 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
    -ccbin "${CMAKE_CUDA_HOST_COMPILER}" -Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra -Xptxas=-v)
  if(GRADWIRE_WERROR)
    list(APPEND gradwire_nvcc_flags -Werror=all-warnings)
  endif()
  file(GLOB gradwire_cuda_headers CONFIGURE_DEPENDS csrc/common/*.h csrc/cuda/*.h csrc/cuda/*.cuh)
  set(gradwire_cuda_objects "")
  foreach(name encode apply half_precision)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o")
    # The report of ptxas (registers, spills) is written to a file beside the object, for .ci/check_kernels.py.
    add_custom_command(OUTPUT "${object}"
      COMMAND ${CMAKE_COMMAND} -E make_directory "${CMAKE_CURRENT_BINARY_DIR}/cuda"
      COMMAND ${CMAKE_COMMAND} "-DREPORT=${object}.txt" -P "${CMAKE_CURRENT_SOURCE_DIR}/cmake/run_nvcc.cmake" --
        "${GRADWIRE_NVCC}" ${gradwire_nvcc_flags} ${gradwire_cuda_architectures}
        -c "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/${name}.cu" -o "${object}"
      DEPENDS "csrc/cuda/${name}.cu" ${gradwire_cuda_headers} cmake/run_nvcc.cmake
      COMMENT "nvcc ${name}.cu" VERBATIM)
    list(APPEND gradwire_cuda_objects "${object}")
  endforeach()
  add_custom_target(gradwire_cuda_kernels DEPENDS ${gradwire_cuda_objects})
endif()
