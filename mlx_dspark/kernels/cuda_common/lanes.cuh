// The instructions of tensor cores and of copies that run beside the arithmetic.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace lanes {

__device__ __forceinline__ void mma(float* sum, const unsigned* a, unsigned b0, unsigned b1, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float* sum, const unsigned* a, unsigned b0, unsigned b1, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same where nothing was summed before.
__device__ __forceinline__ void mma_first(float* sum, const unsigned* a, unsigned b0, unsigned b1, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};\n"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

__device__ __forceinline__ void mma_first(float* sum, const unsigned* a, unsigned b0, unsigned b1, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};\n"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

__device__ __forceinline__ unsigned packed(float low, float high, __half) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}

__device__ __forceinline__ unsigned packed(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}

// word & mask | more, by one instruction: a compiler that sees two constants makes two of it.
__device__ __forceinline__ unsigned masked(unsigned word, unsigned mask, unsigned more) {
  unsigned found;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;\n" : "=r"(found) : "r"(word), "r"(mask), "r"(more));
  return found;
}

// Copies 4, 8 or 16 bytes into shared memory, or zeros where they are not `real`: `from` is not read then.
template <int BYTES>
__device__ __forceinline__ void fetch(void* to, const void* from, bool real) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = real ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(place), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(place), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Until all but the last `LATER` commits of this lane have arrived.
template <int LATER>
__device__ __forceinline__ void arrived() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(LATER) : "memory");
}

__device__ __forceinline__ unsigned char* arena() {
  extern __shared__ uint4 whole[];
  return reinterpret_cast<unsigned char*>(whole);
}

}  // namespace lanes
