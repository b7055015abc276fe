/* ttft_report.c - see ttft_int.h. Level 0 is the resident one. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plot.h"
#include "ttft_int.h"

#define MATCH_POINTS 3.0

static double median(const double *values, size_t n) {
    return neap_summarise(values, n).median;
}

/* TTFT of a side to that of another one, of the measurements of the same turn. added: what the
 * eviction adds to the resident run. */
static neap_summary paired_ratio(const neap_ttft_side *mine, const neap_ttft_side *base,
                                 size_t level, bool added) {
    double ratios[NEAP_BENCH_REPS_MAX];
    size_t n = 0;
    const neap_ttft_series *m = &mine->levels[level], *b = &base->levels[level];
    const double m_sub = added ? median(mine->levels[0].ttft_ms, mine->levels[0].n) : 0;
    const double b_sub = added ? median(base->levels[0].ttft_ms, base->levels[0].n) : 0;
    for (size_t i = 0; i < m->n && i < b->n; i++) {
        const double below = b->ttft_ms[i] - b_sub;
        if (below > 0) ratios[n++] = (m->ttft_ms[i] - m_sub) / below;
    }
    return neap_summarise(ratios, n);
}

/* As in the paper: to partial-offload with llama.cpp's attention. */
static neap_summary ratio(const neap_ttft_grid *g, size_t level, size_t i) {
    return paired_ratio(&g->sides[i], &g->sides[NEAP_TTFT_STOCK], level, false);
}

/* With the same attention; nothing is added at the resident level, and paging has none. */
static neap_summary added_ratio(const neap_ttft_grid *g, size_t level, size_t i) {
    if (level == 0 || neap_ttft_is_paging(&g->sides[i])) return (neap_summary){0};
    return paired_ratio(&g->sides[i], &g->sides[NEAP_TTFT_BASELINE], level, true);
}

static neap_summary paging_ratio(const neap_ttft_grid *g, size_t level, size_t i) {
    for (size_t p = NEAP_TTFT_COMPARED; p < g->n_sides; p++)
        if (neap_ttft_is_paging(&g->sides[p]) && p != i)
            return paired_ratio(&g->sides[i], &g->sides[p], level, false);
    return (neap_summary){0};
}

static json_t *real_or_null(bool known, double value) {
    return known ? json_real(value) : json_null();
}

/* ---- rows ---- */

/* Less is read too quickly to tell the device's rate. */
#define READ_MIN_BYTES (64 << 20)

/* Storage is not always equally fast: the rate measured at the start, or what a restore reached. */
static double fastest_read(const neap_ttft_grid *g) {
    double fastest = g->bench->rate.read_bps;
    for (size_t i = 0; i < g->n_sides; i++)
        for (size_t level = 0; level < g->bench->n_levels; level++) {
            const neap_ttft_series *e = &g->sides[i].levels[level];
            for (size_t run = 0; run < e->n; run++)
                if (e->read_bytes[run] >= READ_MIN_BYTES && e->storage_ms[run] > 0)
                    fastest = fmax(fastest, e->read_bytes[run] / e->storage_ms[run] * 1000);
        }
    return fastest;
}

static double bound_ms(const neap_ttft_grid *g, const neap_ttft_side *s, size_t level) {
    const neap_ttft *b = g->bench;
    const neap_ttft_series *e = &s->levels[level], *resident = &s->levels[0];
    double bound = median(resident->ttft_ms, resident->n);
    if (b->rate.read_bps > 0)
        bound = fmax(bound, median(e->read_bytes, e->n) / fastest_read(g) * 1000);
    if (b->rate.decode_bps > 0)
        bound = fmax(bound, median(e->memory_bytes, e->n) / b->rate.decode_bps * 1000);
    return bound;
}

/* Having the pages again, if nothing else took any time. */
static double commit_ms(const neap_ttft *b, const neap_ttft_series *e) {
    return median(e->committed_bytes, e->n) / b->rate.commit_bps * 1000;
}

static bool is_matched(const neap_ttft *b, const neap_ttft_series *e, size_t level) {
    return fabs(e->remaining - b->levels[level]) * 100 <= MATCH_POINTS;
}

static const char *attention(const neap_ttft_side *s) {
    return s->attn ? s->attn : neap_ttft_is_paging(s) ? "ggml" : "auto";
}

/* What only the backend, or only a side with a resident run, can say. */
static json_t *phases_json(const neap_ttft_side *s, size_t level) {
    const neap_ttft_series *e = &s->levels[level];
    const bool known = !neap_ttft_is_paging(s);
    return json_pack("{s:o, s:o, s:o}", "alloc", real_or_null(known, median(e->alloc_ms, e->n)),
                     "reload", real_or_null(known, median(e->restore_ms, e->n)), "prefill",
                     real_or_null(known, median(e->prefill_ms, e->n)));
}

static json_t *paths_json(const neap_ttft_side *s, size_t level) {
    const neap_ttft_series *e = &s->levels[level];
    const bool known = !neap_ttft_is_paging(s);
    return json_pack("{s:o, s:o}", "storage", real_or_null(known, median(e->storage_ms, e->n)),
                     "memory", real_or_null(known, median(e->memory_ms, e->n)));
}

static json_t *row_json(const neap_ttft_grid *g, size_t level, size_t i) {
    const neap_ttft *b = g->bench;
    const neap_ttft_side *s = &g->sides[i];
    const neap_ttft_series *e = &s->levels[level];
    const bool is_paging = neap_ttft_is_paging(s);
    const neap_summary ttft = neap_summarise(e->ttft_ms, e->n), to_offload = ratio(g, level, i);
    const neap_summary added = added_ratio(g, level, i), to_paging = paging_ratio(g, level, i);
    const double resident_ms = median(s->levels[0].ttft_ms, s->levels[0].n);
    return json_pack(
        "{s:i, s:f, s:f, s:b, s:s, s:s, s:i, s:o, s:o, s:o, s:{s:I, s:I, s:I, s:I}, s:o, s:o, s:f, "
        "s:o, s:o, s:o, s:o, s:f, s:f, s:b, s:s, s:s}",
        "context", (int)g->context, "remaining", b->levels[level], "remaining_measured",
        e->remaining, "remaining_matched", is_matched(b, e, level), "policy", s->policy, "codec",
        is_paging ? "none" : b->codec, "reps", (int)e->n, "ttft_ms", neap_summary_json(&ttft),
        "phase_ms", phases_json(s, level), "path_ms", paths_json(s, level), "bytes", "storage",
        (json_int_t)median(e->storage_bytes, e->n), "memory",
        (json_int_t)median(e->memory_bytes, e->n), "read", (json_int_t)median(e->read_bytes, e->n),
        "committed", (json_int_t)median(e->committed_bytes, e->n), "bound_ms",
        real_or_null(!is_paging, bound_ms(g, s, level)), "commit_ms",
        real_or_null(!is_paging && b->rate.commit_bps > 0, commit_ms(b, e)),
        "ratio_to_partial_offload", to_offload.median, "ratio_to_partial_offload_range",
        neap_summary_json(&to_offload), "added_ratio_to_partial_offload",
        real_or_null(added.n > 0, added.median), "ratio_to_os_paging",
        real_or_null(to_paging.n > 0, to_paging.median), "ratio_to_resident",
        real_or_null(resident_ms > 0, ttft.median / resident_ms), "cpu_s", median(e->cpu_s, e->n),
        "top1_agreement", e->agreement, "output_identical", e->identical, "attn", attention(s),
        "only", b->only_kv ? "kv" : "all");
}

/* ---- table ---- */

static void side_name(const neap_ttft_side *s, char name[48]) {
    snprintf(name, 48, "%s%s%s", s->policy, s->attn ? " " : "", s->attn ? s->attn : "");
}

static void print_row(const neap_ttft_grid *g, size_t level, size_t i) {
    const neap_ttft_series *e = &g->sides[i].levels[level];
    const neap_summary ttft = neap_summarise(e->ttft_ms, e->n);
    const neap_summary added = added_ratio(g, level, i);
    char range[64], added_text[16] = "-", name[48];
    side_name(&g->sides[i], name);
    snprintf(range, sizeof range, "%.0f (%.0f to %.0f)", ttft.median, ttft.min, ttft.max);
    if (added.n) snprintf(added_text, sizeof added_text, "%.2f", added.median);
    printf("%7.0f %%  %-22s %24s %10s %10s %9.2f %9s  %s\n", e->remaining * 100, name, range,
           neap_cli_size((uint64_t)median(e->storage_bytes, e->n)),
           neap_cli_size((uint64_t)median(e->memory_bytes, e->n)), ratio(g, level, i).median,
           added_text, e->identical ? "identical" : "DIFFERS");
}

static void print_table(const neap_ttft_grid *g) {
    printf("%s, context of %ld tokens, %u new ones, codec %s\n", neap_ttft_model(g->bench),
           g->context, NEAP_TTFT_NEW, g->bench->codec);
    printf("%9s  %-22s %24s %10s %10s %9s %9s  %s\n", "REMAINING", "POLICY", "TTFT ms (min to max)",
           "STORAGE", "MEMORY", "RATIO", "ADDED", "OUTPUT");
    for (size_t level = 0; level < g->bench->n_levels; level++)
        for (size_t i = g->n_sides; i-- > 0;)
            if (g->sides[i].levels[level].n) print_row(g, level, i);
}

static int report_series(const neap_ttft_grid *g, size_t level, size_t i, json_t *rows) {
    const neap_ttft *b = g->bench;
    const neap_ttft_side *s = &g->sides[i];
    const neap_ttft_series *e = &s->levels[level];
    if (e->n == 0) return 0;
    json_array_append_new(rows, row_json(g, level, i));
    /* What paging leaves is what it is measured for. */
    if (!neap_ttft_is_paging(s) && !is_matched(b, e, level))
        neap_cli_warn("%s: %.0f %% remaining instead of %.0f %%", s->policy, e->remaining * 100,
                      b->levels[level] * 100);
    if (e->identical) return 0;
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s at %.0f %% remaining: the answer changed",
                          s->policy, b->levels[level] * 100);
}

int neap_ttft_report(const neap_ttft_grid *g, json_t *rows) {
    int status = 0;
    for (size_t level = 0; level < g->bench->n_levels; level++)
        for (size_t i = 0; i < g->n_sides; i++) {
            const int changed = report_series(g, level, i, rows);
            if (changed) status = changed;
        }
    if (!g->bench->options.as_json) print_table(g);
    return status;
}

/* ---- plot ---- */

/* Points from the lowest share up; levels are kept from the highest down. */
static size_t make_points(const neap_ttft_grid *g, const neap_ttft_side *s,
                          neap_plot_point *points) {
    size_t n = 0;
    for (size_t level = g->bench->n_levels; level-- > 0;) {
        const neap_ttft_series *e = &s->levels[level];
        const neap_summary ttft = neap_summarise(e->ttft_ms, e->n);
        if (e->n)
            points[n++] = (neap_plot_point){
                .x = e->remaining * 100, .y = ttft.median, .low = ttft.min, .high = ttft.max};
    }
    return n;
}

typedef struct figure {
    neap_plot_panel panels[NEAP_TTFT_CONTEXTS_MAX];
    char titles[NEAP_TTFT_CONTEXTS_MAX][48];
    char names[NEAP_TTFT_SIDES_MAX][48];
    neap_plot_point points[NEAP_TTFT_CONTEXTS_MAX][NEAP_TTFT_SIDES_MAX][NEAP_TTFT_LEVELS_MAX];
} figure;

static void fill_panel(figure *f, size_t number, const neap_ttft_grid *g) {
    neap_plot_panel *panel = &f->panels[number];
    snprintf(f->titles[number], sizeof f->titles[number], "context of %ld tokens", g->context);
    panel->title = f->titles[number];
    panel->n_series = g->n_sides;
    for (size_t i = 0; i < g->n_sides; i++) {
        neap_plot_point *points = f->points[number][i];
        side_name(&g->sides[i], f->names[i]);
        panel->series[i] = (neap_plot_series){
            .name = f->names[i], .points = points, .n = make_points(g, &g->sides[i], points)};
    }
}

int neap_ttft_plot(const neap_ttft *b, const neap_ttft_grid *grids, size_t n) {
    char title[192];
    figure *f = calloc(1, sizeof *f);
    int err = f ? 0 : -ENOMEM;
    for (size_t i = 0; f && i < n; i++)
        fill_panel(f, i, &grids[i]);
    snprintf(title, sizeof title, "%.96s, %u new tokens, codec %s: median, least and greatest",
             neap_ttft_model(b), NEAP_TTFT_NEW, b->codec);
    const neap_plot plot = {.title = title,
                            .x_label = "remaining in memory, %",
                            .y_label = "time to first token, ms",
                            .panels = f ? f->panels : NULL,
                            .n_panels = n};
    if (!err) err = neap_plot_write(b->plot_path, &plot);
    free(f);
    return err ? neap_cli_error(NEAP_EXIT_FAILED, NULL, "--plot %s: %s", b->plot_path,
                                neap_strerror(err))
               : 0;
}
