# cmake -DNM=... -DARCHIVE=... -P check_symbols.cmake
#
# The kernels' object files are compiled for several instruction sets. A symbol that two of them share would be merged into
# one copy, perhaps one that this processor cannot run; so each may define its own table and nothing else that is global.
execute_process(COMMAND "${NM}" --defined-only --extern-only "${ARCHIVE}" OUTPUT_VARIABLE listing COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" lines "${listing}")
set(object "")
set(tables 0)
foreach(line IN LISTS lines)
  if(line MATCHES "^(.*\\.o(bj)?):$")
    set(object "${CMAKE_MATCH_1}")
  elseif(object MATCHES "^kernels_" AND line MATCHES "[0-9a-f]+ [A-Za-z] (.*)$")
    set(symbol "${CMAKE_MATCH_1}")
    if(NOT symbol MATCHES "^_ZN8gradwire[0-9]+k[A-Za-z0-9]+KernelsE$")
      message(FATAL_ERROR "${object} defines ${symbol}: make it static or put it into an anonymous namespace")
    endif()
    math(EXPR tables "${tables} + 1")
  endif()
endforeach()
if(tables LESS 2)
  message(FATAL_ERROR "found ${tables} tables of kernels in ${ARCHIVE}: is this the right archive?")
endif()
