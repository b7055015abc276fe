/* device_rate.h - what this machine can do at best, for the bounds that benchmarks report. */
#ifndef NEAP_APPS_DEVICE_RATE_H
#define NEAP_APPS_DEVICE_RATE_H

typedef struct neap_device_rate {
    double read_bps; /* direct reads of the model file, many in flight; 0: could not be measured */
    double commit_bps; /* having pages again that went a while ago, all cores; 0: not measured */
    double decode_bps; /* decoding a KV chunk, uncompressed bytes, all cores; 0: not measured */
} neap_device_rate;

/* Some seconds. What fails stays 0. */
void neap_device_rate_measure(const char *file, const char *codec, neap_device_rate *ret_rate);
#endif
