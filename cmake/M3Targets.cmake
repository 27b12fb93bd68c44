# Targets are made by naming convention, so that a new file needs no edit here:
#   X_test.cpp   unit test beside its source     X_bench.cpp   micro-benchmark
#   X_fuzz.cpp   libFuzzer target                 X_avx2.cpp, X_avx512.cpp, X_avx512bf16.cpp
#                                                 one instruction set each, chosen at run time
#   X.cu         CUDA (sm_90a), compiled when M3_CUDA is ON
#   X_cuda_none.cpp                   what takes its place when M3_CUDA is OFF
#   X_cuda_test.cpp, X_cuda_test.cu   tests that need a GPU

# g++ 12 reports the undefined pass-through operands inside its own AVX-512 intrinsics as uninitialised
# (GCC bug 105593); the two warnings are off in those files only.
function(m3_instruction_set_flags)
  foreach(file IN LISTS ARGN)
    if(file MATCHES "_avx2\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c")
    elseif(file MATCHES "_avx512bf16\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS
        "-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512bf16;-mprefer-vector-width=512;-Wno-uninitialized;-Wno-maybe-uninitialized")
    elseif(file MATCHES "_avx512\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS
        "-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mprefer-vector-width=512;-Wno-uninitialized;-Wno-maybe-uninitialized")
    endif()
  endforeach()
endfunction()

# Optimisation by layer. Release means -O3, which only loops over numbers repay: operators and media. Code that parses,
# schedules and prints takes -O2, tests and commands -O1: together a third of the tree's compile time.
function(m3_optimise target level)
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${level}>)
  endif()
endfunction()

# GoogleTest's header costs two seconds a file: all tests share one precompiled copy.
if(M3_TESTS)
  file(WRITE ${CMAKE_BINARY_DIR}/test_headers.cpp "")
  add_library(m3_test_headers STATIC ${CMAKE_BINARY_DIR}/test_headers.cpp)
  target_link_libraries(m3_test_headers PRIVATE GTest::gtest fmt::fmt m3_flags)
  target_compile_definitions(m3_test_headers PRIVATE M3_SOURCE_DIR="${CMAKE_SOURCE_DIR}" $<$<BOOL:${M3_CUDA}>:M3_CUDA=1>)
  target_precompile_headers(m3_test_headers PRIVATE <gtest/gtest.h> <fmt/core.h> <cmath> <algorithm> <filesystem> <functional> <random>)
  m3_optimise(m3_test_headers -O1)
endif()

# m3_test(name SOURCES ... DEPS ... [LABELS cpu|cuda|multi|slow] [TIMEOUT seconds])
function(m3_test name)
  if(NOT M3_TESTS)
    return()
  endif()
  cmake_parse_arguments(T "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT T_LABELS)
    set(T_LABELS cpu)
  endif()
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 300)
  endif()
  add_executable(${name} ${T_SOURCES})
  target_link_libraries(${name} PRIVATE ${T_DEPS} GTest::gtest GTest::gtest_main m3_flags)
  target_compile_definitions(${name} PRIVATE M3_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  m3_optimise(${name} -O1)
  target_precompile_headers(${name} REUSE_FROM m3_test_headers)
  # At -O1 g++ 12 sees writes out of bounds in std::string that are none, and with sanitizers unset functions in <regex>.
  target_compile_options(${name} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-array-bounds>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-stringop-overflow>
    $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>,$<BOOL:${M3_SANITIZE}>>:-Wno-maybe-uninitialized>)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${T_LABELS}" TIMEOUT ${T_TIMEOUT})
endfunction()

# Tests, benchmarks and fuzz targets of one folder. Files ending in _cuda_test.cpp get the label
# cuda: they are built everywhere and skip themselves, by name, where there is no GPU.
function(m3_folder_extras folder)
  cmake_parse_arguments(F "" "" "DEPS" ${ARGN})
  get_filename_component(stem ${folder} NAME)
  file(GLOB tests CONFIGURE_DEPENDS ${folder}/*_test.cpp)
  file(GLOB cuda_tests CONFIGURE_DEPENDS ${folder}/*_cuda_test.cpp ${folder}/*_cuda_test.cu)
  if(cuda_tests)
    list(REMOVE_ITEM tests ${cuda_tests})
  endif()
  if(tests)
    m3_test(test_${stem} SOURCES ${tests} DEPS ${F_DEPS})
  endif()
  if(cuda_tests AND M3_CUDA)
    m3_test(test_${stem}_cuda SOURCES ${cuda_tests} DEPS ${F_DEPS} LABELS cuda)
  endif()
  file(GLOB benches CONFIGURE_DEPENDS ${folder}/*_bench.cpp)
  if(benches AND M3_BENCH)
    add_executable(bench_${stem} ${benches})
    target_link_libraries(bench_${stem} PRIVATE ${F_DEPS} benchmark::benchmark benchmark::benchmark_main m3_flags)
    target_compile_definitions(bench_${stem} PRIVATE M3_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  endif()
  if(M3_FUZZ)
    file(GLOB fuzzers CONFIGURE_DEPENDS ${folder}/*_fuzz.cpp)
    foreach(file IN LISTS fuzzers)
      get_filename_component(fuzz_name ${file} NAME_WE)
      add_executable(${fuzz_name} ${file})
      if(NOT TARGET all_fuzzers)
        add_custom_target(all_fuzzers)
      endif()
      add_dependencies(all_fuzzers ${fuzz_name})
      target_compile_options(${fuzz_name} PRIVATE -fsanitize=fuzzer)
      target_link_options(${fuzz_name} PRIVATE -fsanitize=fuzzer)
      target_link_libraries(${fuzz_name} PRIVATE ${F_DEPS} m3_flags)
    endforeach()
  endif()
endfunction()

function(m3_folder_sources out folder)
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_(test|bench|fuzz)\\.cpp$")
  if(M3_CUDA)
    file(GLOB cuda CONFIGURE_DEPENDS ${folder}/*.cu)
    list(APPEND sources ${cuda})
    list(FILTER sources EXCLUDE REGEX "_(cuda_none\\.cpp|cuda_test\\.cu)$")
  endif()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# One library per layer: every source of this folder. DEPS are the layers and libraries it sees.
function(m3_library name)
  cmake_parse_arguments(L "" "OPTIMISE" "DEPS;PRIVATE_DEPS" ${ARGN})
  m3_folder_sources(sources ${CMAKE_CURRENT_SOURCE_DIR})
  if(sources)
    add_library(${name} STATIC ${sources})
    m3_instruction_set_flags(${sources})
    target_include_directories(${name} PUBLIC ${CMAKE_SOURCE_DIR}/src)
    target_link_libraries(${name} PUBLIC ${L_DEPS} PRIVATE ${L_PRIVATE_DEPS} m3_flags)
    target_compile_definitions(${name} PUBLIC $<$<BOOL:${M3_CUDA}>:M3_CUDA=1>)
    if(NOT L_OPTIMISE)
      set(L_OPTIMISE -O2)
    endif()
    m3_optimise(${name} ${L_OPTIMISE})
  else()
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE ${CMAKE_SOURCE_DIR}/src)
    target_link_libraries(${name} INTERFACE ${L_DEPS} ${L_PRIVATE_DEPS})
  endif()
  # Tests use no OpenMP of their own, and its flag would keep them from the precompiled header.
  list(FILTER L_PRIVATE_DEPS EXCLUDE REGEX "OpenMP")
  m3_folder_extras(${CMAKE_CURRENT_SOURCE_DIR} DEPS ${name} ${L_PRIVATE_DEPS})
endfunction()
