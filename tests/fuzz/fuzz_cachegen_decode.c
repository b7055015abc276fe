/* fuzz_cachegen_decode.c - the cachegen decoder on arbitrary bytes: see fuzz_codec.h. */
#include "cachegen_int.h"

#define FUZZ_CODEC "cachegen"
#define FUZZ_KERNEL_AT(k) neap_cg_kernel_at(k)
#define FUZZ_DECODE_WITH(kernel, src, len, chunk) neap_cg_decode_with(kernel, src, len, chunk)
#define FUZZ_ROWS 64u
#define FUZZ_HIGH_BYTE(x) (0x3c | ((x)&0x80)) /* near 1 */
#include "fuzz_codec.h"

#ifndef NEAP_LIBFUZZER
int main(int argc, char **argv) {
    return fuzz_main(argc, argv);
}
#endif
