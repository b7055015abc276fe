/* neap.h - elastic memory for programs that hold language-model weights and KV caches.
 *
 * An engine owns reserved address ranges (regions) and divides what lies in them into units: one
 * layer's weights, or a KV chunk (256 cells of one layer's K and V). Units can be evicted (their
 * pages go back to the kernel) and are restored, at the same addresses, in the order in which the
 * program says it needs them.
 *
 * Units      bytes; ns (CLOCK_MONOTONIC); cells and rows are counts.
 * Errors     0 or negative: -errno unchanged, or NEAP_E_*; neap_strerror() names both. On failure
 *            ret_ values are untouched.
 * Threads    every function may be called from any thread unless it says otherwise. Between
 *            neap_use_begin() and neap_use_end() nothing is evicted.
 * Ownership  handles are freed by their free function; strings and arrays passed in are copied. */
#ifndef NEAP_H
#define NEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NEAP_VERSION "0.1.0"
#define NEAP_CHUNK_CELLS 256u

#if defined(__GNUC__)
#define NEAP_API __attribute__((visibility("default")))
#else
#define NEAP_API
#endif

/* The closed list of neap's own errors; everything else is a negative errno. */
enum {
    NEAP_E_CORRUPT = -10001, /* bytes failed their checksum or are not of their format */
    NEAP_E_VERSION = -10002, /* a format or program of another version */
    NEAP_E_BOUND = -10003,   /* a size or index outside what the object holds */
    NEAP_E_BUDGET = -10004,  /* a limit set by the user would be exceeded; nothing was done */
    NEAP_E_LATCHED = -10005, /* an earlier failure left the object unusable but for closing */
    NEAP_E_CHANGED = -10006, /* the model file is no longer the one that was loaded */
    NEAP_E_LOST = -10007,    /* the unit's bytes could not be brought back; see neap_stat.lost */
    NEAP_E_SYNTAX = -10008,  /* text that does not follow its grammar */
    NEAP_E_UNKNOWN = -10009, /* no object, codec, policy or command of that name */
};

/* One English phrase for a negative error of this library or of errno; never NULL, static. */
NEAP_API const char *neap_strerror(int err);

typedef struct neap_engine neap_engine;
typedef struct neap_region neap_region;
typedef struct neap_kv neap_kv;
typedef uint32_t neap_unit_id;
#define NEAP_UNIT_NONE UINT32_MAX

/* ---- engine ---- */

/* Zeroed fields mean the default named. */
typedef struct neap_options {
    const char *program;  /* shown by `neap ps`; default "?" */
    const char *codec;    /* none | q8 | cachegen | klt[:RATIO], see neap_use_gguf |
                             lowram[:RATIO], see neap_kv_set_rope; default q8 */
    const char *kv;       /* f16 | klt[:RATIO] | lowram[:RATIO]: chunks are held as klt, or
                             LowRAM fitted to them, coded them, and read so; evictions then
                             take that codec and ratio, too, where they take the other one q8
                             does. Default f16 */
    bool kv_in_parts;     /* of what is held coded, rows of single heads are read: klt's profile
                             that codes each head alone goes first */
    const char *policy;   /* hybrid | partial-offload | ...; default hybrid */
    const char *swap_dir; /* default ${XDG_CACHE_HOME:-~/.cache}/neap/swap */
    uint64_t swap_limit_bytes; /* most bytes in the swap file; default: no limit of our own */
    uint64_t keep_bytes;       /* never evict below; default 0 */
    uint32_t evict_threads;    /* an eviction works on so many, the caller's among them; default:
                                  one a core, up to 4 */
    const char *profile;       /* file of the device profile (neap profile): the restore paths'
                                  throughputs are read from it and, when restores correct them,
                                  written back; default: none */
    bool poison;               /* evicted ranges become PROT_NONE (test builds) */
    bool no_control;           /* do not open the control socket */
    bool watch_pressure;       /* release by itself when memory gets short, on a thread that sleeps
                                  until the kernel says so */
    const char *pressure_watch, *pressure_write; /* systemd's MEMORY_PRESSURE_WATCH and _WRITE */
    /* Write-behind: KV chunks whose cells are all in use are copied to the swap file while nothing
     * uses the engine, so that evicting them later is only dropping them. Most bytes a day, shared
     * by all that have this swap folder; 0: off. */
    uint64_t write_behind_bytes;
    bool write_behind_on_battery; /* also on a battery; fits of codec lowram, too */
    uint64_t idle_ns; /* what is done while idle (write-behind, fits of codec lowram) is done after
                         so long without a use; default 2 s */
    /* Gives regions their memory, for devices that share only what they gave out themselves; NULL,
     * and where it fails: the system's. The memory is aligned to align bytes, reads as zero, is
     * committed when written, and its whole pages go back to the kernel on madvise(2). region_free
     * gets it back readable and writable; it is called when the region is freed. */
    int (*region_alloc)(void *ctx, size_t len_bytes, size_t align, void **ret_base);
    void (*region_free)(void *ctx, void *base);
    void *region_ctx;
} neap_options;

/* Creates the engine, its swap file (lazily), its restore threads and its control socket.
 * Fails: NEAP_E_UNKNOWN (codec or policy); -ENOMEM. A control socket or a swap folder that cannot
 * be used does not fail the engine, it is logged. */
NEAP_API int neap_engine_create(const neap_options *options, neap_engine **ret_engine);
NEAP_API void neap_engine_free(neap_engine *engine); /* takes NULL; all regions must be freed */

/* Sets what `neap ps` and `neap stat` show as the model (copied; a path is cut to its last part).
 */
NEAP_API void neap_engine_set_model(neap_engine *engine, const char *model);

/* With codec or kv klt: caches added from now on are those of the model of this GGUF file. Where
 * `neap train` made what klt needs for it, klt codes them as far as it can (f16, rows not
 * transposed, a layer and head sizes that it was trained for, positions in the layout), else q8
 * does - with kv klt the cache stays f16 -; neap_stat and the log say which, and why. With another
 * codec nothing happens. */
NEAP_API void neap_use_gguf(neap_engine *engine, const char *path);
/* The caches of the region are those of the model of this GGUF, with which neap_use_gguf was called
 * before, maybe not as the last: for hosts with several models that learn late which one a cache
 * belongs to. Nothing happens once klt has coded a chunk of the region. */
NEAP_API void neap_region_use_gguf(neap_region *region, const char *path);

/* ---- regions: reserved address space, committed when first written ---- */

enum {
    NEAP_REGION_WEIGHTS = 1, /* huge pages where units are large enough */
    NEAP_REGION_KV = 2,      /* small pages: grows by the cell */
    NEAP_REGION_SCRATCH = 3, /* compute buffers: released by evict while idle, see below */
};

/* size is rounded up to pages; the base is aligned to 2 MiB. Reads as zero until written. */
NEAP_API int neap_region_create(neap_engine *engine, size_t size, int kind,
                                neap_region **ret_region);
NEAP_API void *neap_region_base(const neap_region *region);
NEAP_API size_t neap_region_size(const neap_region *region);
/* For a program that learns a region's use after reserving it; before any unit is added. */
NEAP_API void neap_region_set_kind(neap_region *region, int kind);
/* Frees the region and every unit that touches it. Waits for uses and restores to end, so not
 * within a use; takes NULL. */
NEAP_API void neap_region_free(neap_region *region);

/* Scratch regions only: names the byte ranges whose content must outlive the end of the current
 * use (graph outputs). Replaces the earlier list. Everything else in the region may be released,
 * and then reads as zero. Until first called, nothing of the region is released.
 * offsets_lens: n pairs (offset, length) in bytes. */
NEAP_API int neap_scratch_hold(neap_region *region, const uint64_t (*offsets_lens)[2], size_t n);

/* ---- weights ---- */

typedef struct neap_weight_extent {
    void *addr; /* inside a region of this engine; any alignment */
    size_t len_bytes;
    const char *path; /* file that holds the same bytes, or NULL: kept in the swap file once
                         evicted, or rebuilt (see rebuild) when that has no room */
    uint64_t
        file_offset; /* addr and file_offset congruent modulo the page size, for direct reads */
    /* With path NULL: writes the bytes again at addr; may be NULL when the swap file must do. */
    int (*rebuild)(void *ctx, void *addr, size_t len_bytes);
    void *rebuild_ctx;
} neap_weight_extent;

/* Registers one layer's weights, or a part of them that may be needed alone (an expert), as a unit;
 * the bytes are in place already and never change.
 * Each extent is released by whole pages inside it; a page it shares with other bytes stays.
 * layer: order of need, 0 first (embedding -1, output after the last).
 * Remembers size, mtime and inode of the files, and a checksum of every extent; restoring verifies
 * both. Fails: -ENOENT etc. of the file; NEAP_E_BOUND (extent outside every region). */
NEAP_API int neap_weights_add(neap_engine *engine, int layer, const neap_weight_extent *extents,
                              size_t n, neap_unit_id *ret_unit);

/* ---- KV caches ---- */

enum { NEAP_KV_F16 = 1, NEAP_KV_BF16 = 2, NEAP_KV_F32 = 3, NEAP_KV_OTHER = 4 /* quantised */ };

/* One plane (K or V) of a layer's cache.
 * Not transposed: [n_streams][n_cells] rows of row_bytes, a cell's row contiguous.
 * Transposed:     [n_streams][row_elems][n_cells] elements; elem_bytes = row_bytes / row_elems. */
typedef struct neap_kv_plane {
    void *base;         /* inside a KV region */
    size_t row_bytes;   /* bytes of one cell */
    uint32_t row_elems; /* values of one cell */
    int type;           /* NEAP_KV_* */
    bool transposed;
} neap_kv_plane;

typedef struct neap_kv_layout {
    int layer;
    uint32_t n_cells; /* cells of one stream */
    uint32_t n_streams;
    size_t n_planes; /* 1 or 2 */
    neap_kv_plane planes[2];
    /* [n_streams * n_cells] position of each cell, to which its K is turned; -1: unknown. Codec klt
     * reads them while nothing uses the engine; they change within a use that writes the cell, and
     * live until the region is freed. NULL: none, and klt does not code this cache. */
    const int32_t *positions;
} neap_kv_layout;

/* Registers a layer's cache. Its units exist from now on, empty: an empty unit holds nothing and is
 * neither evicted nor counted. Chunk c of stream s (cells 256c .. 256c+255) is unit
 * neap_kv_unit(kv, s, c). A transposed plane cannot be cut by cells: a layer that has one forms one
 * unit a stream, and neap_kv_unit gives that unit for every chunk. */
NEAP_API int neap_kv_add(neap_engine *engine, const neap_kv_layout *layout, neap_kv **ret_kv);
/* What the K of a cache is turned by: the parameters of ggml's ROPE. */
typedef struct neap_kv_rope {
    int32_t mode;   /* NORM 0, NEOX 2, by sections (M-RoPE, which turns text as NEOX) 8 or 40 */
    int32_t n_dims; /* 0: keys are not turned */
    int32_t n_ctx_orig;
    float freq_base, freq_scale;
    float ext_factor, attn_factor, beta_fast, beta_slow; /* YaRN */
    const float *freq_factors;                           /* [n_dims / 2]; NULL: all 1 */
} neap_kv_rope;
/* Codec and kv lowram need it, and the elements of a head's K; caches of which it does not know are
 * q8's. The first call counts. Fails: -ENOTSUP (a mode or a size that is not known); -ENOMEM. */
NEAP_API int neap_kv_set_rope(neap_kv *kv, uint32_t k_head_dim, const neap_kv_rope *rope);
NEAP_API neap_unit_id neap_kv_unit(const neap_kv *kv, uint32_t stream, uint32_t chunk);
NEAP_API uint32_t neap_kv_n_chunks(const neap_kv *kv); /* of one stream */
/* One past the highest cell of the stream that is in use; 0: none. */
NEAP_API uint32_t neap_kv_used(const neap_kv *kv, uint32_t stream);
/* kv handles live until their region is freed. */

/* Replaces the layout of a cache in which nothing was written yet (llama.cpp's V is known to be
 * transposed only by the first graph). Fails: -EBUSY when cells are in use. */
NEAP_API int neap_kv_relayout(neap_kv *kv, const neap_kv_layout *layout);

/* The caller is about to write cells [first, first + n) of a stream. Brings the units concerned
 * back where needed, forgets their stale copies and marks the cells used. Within a use.
 * A unit of which all used cells are about to be overwritten needs no restore: whole = true says
 * that every byte of the cells named will be written. Fails: NEAP_E_LOST, errors of the restore. */
NEAP_API int neap_kv_write(neap_kv *kv, uint32_t stream, uint32_t first, uint32_t n, bool whole);

/* Makes a lost unit usable again, all of its cells reading as zero: for a caller that keeps account
 * of which cells must not be read any more. Within a use. Fails: -EINVAL (the unit is not lost). */
NEAP_API int neap_kv_forget(neap_kv *kv, uint32_t stream, uint32_t chunk);

/* All cells of the cache become unused; copies are dropped and memory released. Within no use. */
NEAP_API int neap_kv_clear(neap_kv *kv);

/* ---- KV held coded (option kv) ----
 * At the end of a computation, chunks whose cells are all in use, and so many more cells of whose
 * stream were written since, are coded: what that makes stays in memory and the pages go back. Such
 * a chunk counts as evicted. Whoever needs its pages brings them back as any other's (neap_need,
 * neap_wait, neap_kv_write), and the use's end drops them again; but it can be read as it is, as
 * rows decoded into memory of the reader's. */
#define NEAP_KV_EXACT_CELLS 256u

/* Whether chunks of this cache are held coded. Within a use it does not change; with kv klt never
 * once cells are in use, with kv lowram they are as long as there is a fit of the context. And
 * whether they may come to be. */
NEAP_API bool neap_kv_is_held_coded(const neap_kv *kv);
NEAP_API bool neap_kv_may_be_held_coded(const neap_kv *kv);
/* Whether this chunk is, now: within a use only the writer of its cells, and who asks for its
 * pages, may change that. */
NEAP_API bool neap_kv_is_coded(const neap_kv *kv, uint32_t stream, uint32_t chunk);
/* Bytes of scratch for neap_kv_read(), aligned to 64, one for each thread. */
NEAP_API size_t neap_kv_read_scratch(const neap_kv *kv);
/* Within a use in which nobody writes to the chunk: decodes its rows [first, first + n): row first
 * of plane p goes to rows[p], the others follow at its row_bytes. They are the rows that
 * a restoration would bring, to the bit. A record that was evicted to storage comes into memory.
 * Fails: -EAGAIN (the chunk is not coded any more: wait for its pages), NEAP_E_BOUND, NEAP_E_LOST,
 * errors of the restore. */
NEAP_API int neap_kv_read(neap_kv *kv, uint32_t stream, uint32_t chunk, uint32_t first, uint32_t n,
                          void *const rows[2], void *scratch);
/* The same of one KV head of the rows: bytes of the others are not touched. */
NEAP_API int neap_kv_read_head(neap_kv *kv, uint32_t stream, uint32_t chunk, uint32_t first,
                               uint32_t n, uint32_t head, void *const rows[2], void *scratch);
/* 0: some cell of the chunk is not in use. Else a number that changes whenever it is written to. */
NEAP_API uint64_t neap_kv_stamp(const neap_kv *kv, uint32_t stream, uint32_t chunk);
/* Bytes of memory that who reads the cache so keeps for it beside it: they count as its compressed
 * ones. Replaces what was said before. */
NEAP_API void neap_kv_set_overhead(neap_kv *kv, uint64_t bytes);
/* Within a use: brings a coded chunk's record into memory. Fails: as neap_kv_read(). */
NEAP_API int neap_kv_fetch(neap_kv *kv, uint32_t stream, uint32_t chunk);

/* ---- use ---- */

/* Between begin and end the caller computes on units; several uses may run at once. begin waits
 * while an eviction runs or one is waiting (evictions come first); both are cheap otherwise. A
 * thread must not begin a use within a use of its own.
 * kind: NEAP_USE_COMPUTE counts as inference in the state shown; NEAP_USE_ACCESS does not. */
enum { NEAP_USE_COMPUTE = 1, NEAP_USE_ACCESS = 2 };
NEAP_API void neap_use_begin(neap_engine *engine, int kind);
NEAP_API void neap_use_end(neap_engine *engine, int kind);

/* True when no unit at all is evicted or restoring: one atomic load. */
NEAP_API bool neap_all_resident(const neap_engine *engine);
/* True when this unit is resident (or empty). */
NEAP_API bool neap_unit_resident(const neap_engine *engine, neap_unit_id unit);

/* True when the policy goes by use (lru): then neap_need wants to know every unit that a graph
 * needs, resident ones too. */
NEAP_API bool neap_tracks_use(const neap_engine *engine);

/* Within a use: starts restoring the units named, first needed first; resident ones are skipped.
 * Returns at once. Later calls append. Under a policy without overlap (partial-offload, mz-no,
 * mz-ar) it returns only when all of them are back. */
NEAP_API int neap_need(neap_engine *engine, const neap_unit_id *units, size_t n);
/* Within a use: blocks until the unit is resident, starting its restore if nobody did.
 * Fails: NEAP_E_LOST, NEAP_E_CHANGED, NEAP_E_CORRUPT, -EIO ...: the unit's content is not there. */
NEAP_API int neap_wait(neap_engine *engine, neap_unit_id unit);

/* Request marks for `last_request`: begin at its first graph, first_token at its first logits.
 * began_ns 0 means now. */
NEAP_API void neap_request_begin(neap_engine *engine, uint64_t began_ns);
NEAP_API void neap_request_first_token(neap_engine *engine);

/* ---- evict, restore, observe ---- */

enum { NEAP_ONLY_ALL = 0, NEAP_ONLY_WEIGHTS = 1, NEAP_ONLY_KV = 2 };

typedef struct neap_evict_request {
    uint64_t bytes;    /* at least so many; UINT64_MAX means all */
    uint32_t permille; /* if not 0, instead of bytes: of what is evictable when all is resident */
    int only;          /* NEAP_ONLY_* */
    bool by_pressure;  /* comes back by itself when memory is no longer short (watch_pressure) */
} neap_evict_request;

typedef struct neap_evict_result {
    uint64_t asked_bytes;
    uint64_t released_bytes;   /* what the kernel got back, compressed copies subtracted */
    uint64_t weights_bytes;    /* of that: weights dropped */
    uint64_t kv_memory_bytes;  /* KV bytes (uncompressed) with copies in memory now */
    uint64_t kv_storage_bytes; /* KV bytes (uncompressed) that went to the swap file or were clean
                                  there */
    uint64_t scratch_bytes;    /* compute buffers released */
    uint64_t duration_ns;
    bool exhausted;    /* there was no more to release */
    int storage_error; /* 0, or why the swap file took no more (units stayed resident) */
} neap_evict_result;

/* Waits for the running uses to end (graph boundaries), then evicts. One eviction runs at a time;
 * others wait. A full disk or a swap limit is no failure: what could not be stored stays resident
 * and storage_error says why. Without by_pressure everything that is evicted then, by whatever,
 * stays so until it is used or neap_restore() is called. Fails: -EINVAL (nothing asked). */
NEAP_API int neap_evict(neap_engine *engine, const neap_evict_request *request,
                        neap_evict_result *ret_result);

/* Releases until the share of what is evictable that belongs to an Android trim level is out of
 * memory: 5 RUNNING_MODERATE 1/8, 10 RUNNING_LOW 1/4, 15 RUNNING_CRITICAL 1/2, 20 UI_HIDDEN 1/4,
 * 40 BACKGROUND 1/2, 60 MODERATE 3/4, 80 COMPLETE all; between two the lower one. The share may be
 * out already: then nothing is done. Fails: -EINVAL below 5; as neap_evict(). */
NEAP_API int neap_trim(neap_engine *engine, int level);

/* Brings everything back and returns when it is; cheaper than what a request would wait for.
 * Fails with the first error (what could be restored is), NEAP_E_LOST when a unit is lost,
 * -ECANCELED when an eviction came in between. */
NEAP_API int neap_restore(neap_engine *engine, uint64_t *ret_bytes);

/* False when an attention is to begin only when all chunks of its layer are back (a policy that
 * shows what beginning earlier gains). */
NEAP_API bool neap_waits_within_layers(const neap_engine *engine);

/* Counts attention operations for neap_stat: those of our kernels (named) and those that the host
 * computed. */
NEAP_API void neap_attention_count(neap_engine *engine, const char *kernel, uint64_t n_ours,
                                   uint64_t n_host);

/* What one attention took by the host's kernel and by ours. The times of a kind (a text of at most
 * 127 bytes that tells kinds apart) are kept with the device profile, where there is one: recall
 * gives false when they are not known. */
typedef struct neap_attention_times {
    uint64_t host_ns, our_ns;
} neap_attention_times;
NEAP_API bool neap_attention_recall(neap_engine *engine, const char *kind,
                                    neap_attention_times *ret_times);
NEAP_API void neap_attention_keep(neap_engine *engine, const char *kind,
                                  const neap_attention_times *times);

typedef enum neap_stage {
    NEAP_STAGE_NONE,
    NEAP_STAGE_KVONLY,
    NEAP_STAGE_KVANDW,
    NEAP_STAGE_WONLY,
    NEAP_STAGE_COMPKV,
} neap_stage;
typedef enum neap_state {
    NEAP_STATE_IDLE,
    NEAP_STATE_INFERENCE,
    NEAP_STATE_EVICTING,
    NEAP_STATE_RESTORING,
} neap_state;

/* Where the throughputs come from that evictions place by. */
typedef enum neap_rate_source {
    NEAP_RATES_DEFAULT,  /* nothing was measured yet */
    NEAP_RATES_MEASURED, /* a profile, or restores */
    NEAP_RATES_DRIFTED,  /* restores were off from the profile by more than a quarter */
} neap_rate_source;

typedef enum neap_pressure {
    NEAP_PRESSURE_OFF, /* not watched */
    NEAP_PRESSURE_CALM,
    NEAP_PRESSURE_SHORT,
    NEAP_PRESSURE_CRITICAL,
} neap_pressure;

typedef enum neap_write_behind_state {
    NEAP_WRITE_BEHIND_OFF,
    NEAP_WRITE_BEHIND_WAITING, /* in use, or everything is written */
    NEAP_WRITE_BEHIND_WRITING,
    NEAP_WRITE_BEHIND_BATTERY, /* until the machine is fed again */
    NEAP_WRITE_BEHIND_NO_ROOM, /* half of the swap limit, or 95 % of the file system, is taken */
    NEAP_WRITE_BEHIND_SPENT,   /* the bytes of this day are written */
    NEAP_WRITE_BEHIND_FAILED,  /* the last write failed; it is tried again after the next use */
} neap_write_behind_state;

/* The KV caches of one region: of a context, or of its layers with a sliding window. */
typedef struct neap_context_stat {
    uint32_t n_ctx;
    uint64_t tokens;
    char kv[32]; /* as neap_stat.kv */
    double
        kv_ratio; /* f16 bytes of the cells in use over all bytes kept of them, anywhere; 0: none */
    double klt_error;   /* as neap_stat.klt_error */
    uint64_t fit_bytes; /* as neap_stat.fit_bytes */
    uint32_t klt_chunks, klt_left, klt_refused;
} neap_context_stat;
#define NEAP_STAT_CONTEXTS 8u

/* Meanings as in `neap stat --json` (docs/man/neap-stat.1). */
typedef struct neap_stat {
    neap_state state;
    neap_stage stage;
    uint32_t n_ctx, n_contexts;
    uint64_t tokens; /* cells in use */
    uint64_t weights_total, weights_resident;
    uint64_t kv_total, kv_resident, kv_compressed_memory, kv_storage;
    uint64_t fit_bytes; /* lowram: of kv_compressed_memory, what it fitted to contexts */
    uint64_t scratch_resident;
    uint64_t released; /* given back now: total - resident - compressed in memory */
    uint32_t units_weights, units_weights_evicted, units_kv, units_kv_evicted, lost;
    uint64_t evictions, restores, bytes_evicted, bytes_restored_storage, bytes_restored_memory;
    uint64_t wait_ns, errors;
    uint64_t ttft_ns, restore_ns;
    uint64_t allocate_ns, storage_ns, memory_ns;
    double overlap;                /* of the last restore: 1 - waited / restored, 0..1 */
    uint64_t read_bps, decode_bps; /* of the restore paths, as evictions reckon with them */
    neap_rate_source rate_source;
    char model[256];
    char codec[32], policy[32];
    char codec_note[320]; /* klt, lowram: which file, fit, or why another codec is at work; else
                             empty */
    char kv[32];          /* how KV is held and read: f16, the file of kv klt, like klt-layer-8, or
                             lowram-4 once a context is fitted */
    double kv_ratio;      /* f16 bytes of KV chunks that have a copy, over the copies; 0: none */
    /* klt, lowram: mean error of what it coded over what training, fit make expect, 0: nothing;
     * chunks that it coded, and chunks of its layers that q8 did, some of them because its error
     * was over the limit. */
    double klt_error;
    uint32_t klt_chunks, klt_left, klt_refused;
    char attention[16]; /* our kernels that ran, by name; empty: none yet */
    uint64_t attentions, attentions_host;
    char last_error[256];
    neap_pressure pressure;
    uint64_t pressure_looks, pressure_releases, pressure_released_bytes;
    uint64_t pressure_restored_bytes; /* brought back by itself after it */
    uint64_t pressure_owed_bytes;     /* taken by pressure, not back yet */
    char pressure_sources[64];
    uint64_t bytes_read_storage;    /* by restores, as they lie there */
    uint64_t bytes_committed;       /* of pages that restores had again */
    uint64_t bytes_written_storage; /* to the swap file, by evictions and by write-behind */
    neap_write_behind_state write_behind;
    uint64_t write_behind_bytes_today;
    uint32_t clean_chunks; /* resident KV chunks with a copy in the swap file */
    neap_context_stat contexts[NEAP_STAT_CONTEXTS]; /* the first ones */
    uint32_t n_context_stats;
} neap_stat;

NEAP_API void neap_stat_get(neap_engine *engine, neap_stat *ret_stat);

/* Checks every invariant of the unit table; aborts with a message if one is broken (tests). */
NEAP_API void neap_check(neap_engine *engine);

/* Log lines go to stderr unless a sink is set. level: 0 error, 1 warning, 2 info, 3 debug. */
NEAP_API void neap_set_log(void (*sink)(int level, const char *line, void *ctx), void *ctx);

#ifdef __cplusplus
}
#endif
#endif
