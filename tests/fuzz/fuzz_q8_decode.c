/* fuzz_q8_decode.c - the q8 decoder on arbitrary bytes: see fuzz_codec.h. */
#include "q8_int.h"

#define FUZZ_CODEC "q8"
#define FUZZ_KERNEL_AT(k) neap_q8_kernel_at(k)
#define FUZZ_DECODE_WITH(kernel, src, len, chunk) neap_q8_decode_with(kernel, src, len, chunk)
#define FUZZ_ROWS 9u
#define FUZZ_HIGH_BYTE(x) ((x)&0xbb)
#include "fuzz_codec.h"

#ifndef NEAP_LIBFUZZER
int main(int argc, char **argv) {
    return fuzz_main(argc, argv);
}
#endif
