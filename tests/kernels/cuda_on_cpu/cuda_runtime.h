// CUDA C++ on a CPU, as much of it as the kernels here use: sources compile with a plain C++ compiler and run, so that
// their arithmetic, indices and barriers are tested without a GPU. One block runs at a time; its threads are coroutines
// that change over at barriers, and what a block shares is static.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x, unsigned y, unsigned z) : x(x), y(y), z(z) {}
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

using std::max;

// What the thread that runs sees.
inline dim3 threadIdx;
inline dim3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;

namespace on_cpu {

constexpr size_t kStack = 128 << 10;

// What went wrong in a launch, with CUDA's numbers.
constexpr int kMisaligned = 716;
constexpr int kWaitsForever = 719;
inline int error = 0;

// Where threads meet, with what they bring put together.
struct Meeting {
  unsigned arrived = 0;
  unsigned generation = 0;
  unsigned brought = 0;
  unsigned result = 0;
};

struct Block {
  std::vector<ucontext_t> threads;
  std::vector<bool> is_done;
  std::vector<Meeting> warps;
  Meeting all;
  ucontext_t scheduler;
  unsigned running = 0;
  // threads that arrived somewhere or ended, so far
  unsigned moves = 0;
  std::function<void()> body;
};
inline Block* block = nullptr;
inline std::vector<std::unique_ptr<char[]>> stacks;

inline void change_over() { swapcontext(&block->threads[block->running], &block->scheduler); }

template <class Operation>
unsigned meet(Meeting& meeting, unsigned size, unsigned value, Operation operation) {
  const unsigned generation = meeting.generation;
  ++block->moves;
  meeting.brought = meeting.arrived == 0 ? value : operation(meeting.brought, value);
  if (++meeting.arrived == size) {
    meeting.result = meeting.brought;
    meeting.arrived = 0;
    ++meeting.generation;
  }
  while (meeting.generation == generation) change_over();
  return meeting.result;
}

inline void run_thread() {
  block->body();
  block->is_done[block->running] = true;
  ++block->moves;
  change_over();
}

inline void run_block(unsigned threads, const std::function<void()>& body) {
  Block one;
  block = &one;
  one.body = body;
  one.threads.resize(threads);
  one.is_done.assign(threads, false);
  one.warps.resize((threads + 31) / 32);
  while (stacks.size() < threads) stacks.emplace_back(new char[kStack]);
  for (unsigned n = 0; n < threads; ++n) {
    getcontext(&one.threads[n]);
    one.threads[n].uc_stack.ss_sp = stacks[n].get();
    one.threads[n].uc_stack.ss_size = kStack;
    makecontext(&one.threads[n], run_thread, 0);
  }
  for (unsigned left = threads; left > 0;) {
    const unsigned before = one.moves;
    for (unsigned n = 0; n < threads; ++n) {
      if (one.is_done[n]) continue;
      one.running = n;
      threadIdx = dim3(n, 0, 0);
      swapcontext(&one.scheduler, &one.threads[n]);
      left -= one.is_done[n];
    }
    // threads that wait for others that have ended, or wait elsewhere
    if (one.moves == before) {
      error = kWaitsForever;
      break;
    }
  }
  block = nullptr;
}

}  // namespace on_cpu

inline bool __syncthreads_or(int value) {
  return on_cpu::meet(on_cpu::block->all, blockDim.x, value != 0, [](unsigned a, unsigned b) { return a | b; });
}
inline void __syncthreads() { __syncthreads_or(0); }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return on_cpu::meet(on_cpu::block->warps[threadIdx.x / 32], 32, value, [](unsigned a, unsigned b) { return max(a, b); });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return on_cpu::meet(on_cpu::block->warps[threadIdx.x / 32], 32, value, [](unsigned a, unsigned b) { return a + b; });
}

inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int n = 0; n < 4; ++n) {
    const unsigned from = selector >> (4 * n) & 7;
    result |= static_cast<unsigned>(both >> (8 * from) & 0xFF) << (8 * n);
  }
  return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
// aligned as a GPU asks for
inline uint4 __ldcs(const uint4* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) on_cpu::error = on_cpu::kMisaligned;
  return *from;
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = max(before, value);
  return before;
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  const unsigned long long before = *at;
  *at = before + value;
  return before;
}

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  on_cpu::error = cudaSuccess;
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  // the last block first: nobody may count on their order
  for (unsigned z = gridDim.z; z-- > 0;) {
    for (unsigned y = gridDim.y; y-- > 0;) {
      for (unsigned x = gridDim.x; x-- > 0;) {
        blockIdx = dim3(x, y, z);
        on_cpu::run_block(blockDim.x, [&] { kernel(arguments...); });
      }
    }
  }
  return on_cpu::error;
}
