// decode over quantised caches, with fp16 queries: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_fp16_576_raw_64, __half, 576, Raw, 64)
FM_DECODE_KERNELS(fm_decode_fp16_576_raw_32, __half, 576, Raw, 32)
FM_DECODE_KERNELS(fm_decode_fp16_576_raw_16, __half, 576, Raw, 16)
FM_DECODE_KERNEL(fm_decode_fp16_512_raw_64, __half, 512, Raw, 64)
FM_DECODE_KERNELS(fm_decode_fp16_512_raw_32, __half, 512, Raw, 32)
FM_DECODE_KERNELS(fm_decode_fp16_512_raw_16, __half, 512, Raw, 16)
