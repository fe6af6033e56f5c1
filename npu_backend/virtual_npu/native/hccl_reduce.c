/* Element types of HCCL, and reductions of what all ranks put into their slots. */
#include "hccl.h"

#include <string.h>

enum { INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BFP16, INT128, HIF8 = 14, FP8E4M3,
    FP8E5M2, FP8E8M0 };
enum { SUM, PROD, MAX, MIN };
enum { BLOCK = 512 }; /* elements that are accumulated at a time */

size_t vhccl_element_size(HcclDataType type) {
    switch ((int)type) {
        case INT8: case UINT8: case HIF8: case FP8E4M3: case FP8E5M2: case FP8E8M0: return 1;
        case INT16: case UINT16: case FP16: case BFP16: return 2;
        case INT32: case UINT32: case FP32: return 4;
        case INT64: case UINT64: case FP64: return 8;
        case INT128: return 16;
        default: return 0;
    }
}

/* ---- the two half types, as bits; to float exactly, back by rounding to the nearest even ---- */

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float load_bfp16(uint16_t half) { return from_bits((uint32_t)half << 16); }
static uint16_t store_bfp16(float value) {
    uint32_t bits = to_bits(value);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float load_fp16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);   /* infinity, nan */
    float magnitude = from_bits((rest << 13) + 0x38000000);                           /* exponent bias 15 -> 127 */
    if (rest < 0x400) magnitude = (float)rest * 0x1p-24f;                             /* subnormal */
    return from_bits(sign | to_bits(magnitude));
}
static uint16_t store_fp16(float value) {
    uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                         /* rounds past 65504 */
    if (rest < 0x38800000) return (uint16_t)(sign | (to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f))); /* subnormal */
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

/* ---- reductions ---- */

#define PLAIN(value) (value)
#define LARGER(a, b) ((b) > (a) || (b) != (b) ? (b) : (a)) /* nan wins, as in torch */
#define SMALLER(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define EACH(expression) \
    for (size_t i = 0; i < n; i++) { b = LOAD(source[i]); a[i] = (expression); }

/* One function per type: `wide` is what it accumulates in. */
#define DEFINE_REDUCE(name, element, wide) \
    static void name(element *to, const char *from, size_t stride, uint32_t ranks, size_t count, HcclReduceOp op) { \
        for (size_t start = 0; start < count; start += BLOCK) { \
            size_t n = count - start < BLOCK ? count - start : BLOCK; \
            wide a[BLOCK], b; \
            for (uint32_t rank = 0; rank < ranks; rank++) { \
                const element *source = (const element *)(from + rank * stride) + start; \
                if (!rank) EACH(b) \
                else if (op == SUM) EACH(a[i] + b) \
                else if (op == PROD) EACH(a[i] * b) \
                else if (op == MAX) EACH(LARGER(a[i], b)) \
                else EACH(SMALLER(a[i], b)) \
            } \
            for (size_t i = 0; i < n; i++) to[start + i] = (element)STORE(a[i]); \
        } \
    }

#define LOAD PLAIN
#define STORE PLAIN
DEFINE_REDUCE(reduce_int8, int8_t, int8_t)
DEFINE_REDUCE(reduce_uint8, uint8_t, uint8_t)
DEFINE_REDUCE(reduce_int16, int16_t, int16_t)
DEFINE_REDUCE(reduce_uint16, uint16_t, uint16_t)
DEFINE_REDUCE(reduce_int32, int32_t, int32_t)
DEFINE_REDUCE(reduce_uint32, uint32_t, uint32_t)
DEFINE_REDUCE(reduce_int64, int64_t, int64_t)
DEFINE_REDUCE(reduce_uint64, uint64_t, uint64_t)
DEFINE_REDUCE(reduce_fp32, float, float)
DEFINE_REDUCE(reduce_fp64, double, double)
#undef LOAD
#undef STORE
#define LOAD load_fp16
#define STORE store_fp16
DEFINE_REDUCE(reduce_fp16, uint16_t, float)
#undef LOAD
#undef STORE
#define LOAD load_bfp16
#define STORE store_bfp16
DEFINE_REDUCE(reduce_bfp16, uint16_t, float)

HcclResult vhccl_reduce(void *to, const char *from, size_t stride, uint32_t ranks, size_t count, HcclDataType type,
                        HcclReduceOp op) {
    if ((int)op > MIN) {
        vnpu_error(VHCCL_NOT_SUPPORTED, "HCCL: reduction %d is not known (sum 0, prod 1, max 2, min 3)", (int)op);
        return VHCCL_NOT_SUPPORTED;
    }
    switch ((int)type) {
        case INT8: reduce_int8(to, from, stride, ranks, count, op); break;
        case UINT8: reduce_uint8(to, from, stride, ranks, count, op); break;
        case INT16: reduce_int16(to, from, stride, ranks, count, op); break;
        case UINT16: reduce_uint16(to, from, stride, ranks, count, op); break;
        case INT32: reduce_int32(to, from, stride, ranks, count, op); break;
        case UINT32: reduce_uint32(to, from, stride, ranks, count, op); break;
        case INT64: reduce_int64(to, from, stride, ranks, count, op); break;
        case UINT64: reduce_uint64(to, from, stride, ranks, count, op); break;
        case FP16: reduce_fp16(to, from, stride, ranks, count, op); break;
        case FP32: reduce_fp32(to, from, stride, ranks, count, op); break;
        case FP64: reduce_fp64(to, from, stride, ranks, count, op); break;
        case BFP16: reduce_bfp16(to, from, stride, ranks, count, op); break;
        default:
            vnpu_error(VHCCL_NOT_SUPPORTED, "HCCL: elements of type %d cannot be reduced", (int)type);
            return VHCCL_NOT_SUPPORTED;
    }
    return VHCCL_OK;
}
