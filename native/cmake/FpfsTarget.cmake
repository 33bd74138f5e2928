# fpfs_target(NAME): language level, warnings as errors and the chosen sanitizer for one target.

if("${FPFS_SANITIZE}" STREQUAL "address")
  set(FPFS_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=undefined)
elseif("${FPFS_SANITIZE}" STREQUAL "undefined")
  set(FPFS_SANITIZE_FLAGS -fsanitize=undefined -fno-sanitize-recover=undefined)
elseif("${FPFS_SANITIZE}" STREQUAL "thread")
  set(FPFS_SANITIZE_FLAGS -fsanitize=thread)
elseif(NOT "${FPFS_SANITIZE}" STREQUAL "")
  message(FATAL_ERROR "FPFS_SANITIZE is \"${FPFS_SANITIZE}\": use address, undefined or thread")
endif()

if(FPFS_FUZZ)
  # The fuzzer needs to see which branches its input takes; faults are found by the sanitizers.
  set(FPFS_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=undefined)
  list(APPEND FPFS_SANITIZE_FLAGS -fsanitize=fuzzer-no-link)
endif()

set(FPFS_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror)
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # GCC leaves signs out of -Wconversion in C++; the two compilers ask for the same here.
  list(APPEND FPFS_WARNINGS -Wthread-safety -Wno-sign-conversion)
endif()
if("${FPFS_SANITIZE}" STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC warns that ThreadSanitizer does not model atomic_thread_fence: the arena's are for kills.
  list(APPEND FPFS_WARNINGS -Wno-tsan)
endif()

function(fpfs_target name)
  target_compile_features(${name} PUBLIC cxx_std_20)
  set_target_properties(${name} PROPERTIES CXX_EXTENSIONS OFF)
  target_compile_definitions(${name} PRIVATE _GNU_SOURCE)
  # Assertions stay in every build: they are cheap beside device I/O, and guard acknowledged bytes.
  target_compile_options(${name} PRIVATE ${FPFS_WARNINGS} -UNDEBUG)
  if(FPFS_SANITIZE_FLAGS)
    target_compile_options(${name} PUBLIC ${FPFS_SANITIZE_FLAGS} -fno-omit-frame-pointer)
    target_link_options(${name} PUBLIC ${FPFS_SANITIZE_FLAGS})
  endif()
endfunction()
