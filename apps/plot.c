/* plot.c - see plot.h. Coordinates are pixels, y down; colours and greys have enough contrast on
 * white and on black, and the background is left to the page. */
#include "plot.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>

#define PANEL_W 330.0
#define PANEL_H 240.0
#define LEFT 70.0 /* of a panel's frame: room for the y axis */
#define TOP 66.0
#define BOTTOM 56.0
#define LEGEND_LINE 20.0
#define N_TICKS 5
#define GREY "#808080"

static const char *const colours[] = {"#2f86d6", "#e07b00", "#1b9e77", "#c2528b",
                                      "#8a6fd1", "#a6761d", "#6b8e23", "#d64545"};
enum { N_COLOURS = sizeof colours / sizeof *colours };

/* A panel's frame, and the values at its edges. */
typedef struct frame {
    FILE *out;
    const neap_plot *plot;
    const neap_plot_panel *panel;
    double left, top, x_min, x_max, y_max, y_step;
} frame;

static void put_text(FILE *out, const char *text) {
    for (; *text; text++) {
        const char *entity = *text == '<'   ? "&lt;"
                             : *text == '>' ? "&gt;"
                             : *text == '&' ? "&amp;"
                                            : NULL;
        if (entity)
            fputs(entity, out);
        else
            fputc(*text, out);
    }
}

static void label(FILE *out, double x, double y, const char *how, const char *text) {
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, how);
    put_text(out, text);
    fputs("</text>\n", out);
}

static void line(FILE *out, double x1, double y1, double x2, double y2, const char *how) {
    fprintf(out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2,
            how);
}

/* A step of 1, 2 or 5 times a power of ten. */
static double round_step(double range) {
    const double raw = range / N_TICKS, power = pow(10, floor(log10(raw)));
    const double rest = raw / power;
    return power * (rest <= 1 ? 1 : rest <= 2 ? 2 : rest <= 5 ? 5 : 10);
}

static bool is_drawn(const neap_plot_point *p) {
    return isfinite(p->x) && isfinite(p->y) && isfinite(p->low) && isfinite(p->high);
}

/* ---- axes ---- */

static frame make_frame(FILE *out, const neap_plot *plot, size_t i) {
    frame f = {.out = out,
               .plot = plot,
               .panel = &plot->panels[i],
               .left = LEFT + (double)i * (PANEL_W + LEFT),
               .top = TOP,
               .x_min = INFINITY,
               .x_max = -INFINITY};
    for (size_t s = 0; s < f.panel->n_series; s++)
        for (size_t p = 0; p < f.panel->series[s].n; p++) {
            const neap_plot_point *point = &f.panel->series[s].points[p];
            if (!is_drawn(point)) continue;
            f.x_min = fmin(f.x_min, point->x);
            f.x_max = fmax(f.x_max, point->x);
            f.y_max = fmax(f.y_max, fmax(point->y, point->high));
        }
    if (!(f.x_min < f.x_max)) {
        f.x_min = isfinite(f.x_min) ? f.x_min - 1 : 0;
        f.x_max = f.x_min + 2;
    }
    const double x_step = round_step(f.x_max - f.x_min);
    f.x_min = floor(f.x_min / x_step + 1e-9) * x_step; /* a tick at the left end */
    if (!(f.y_max > 0)) f.y_max = 1;
    f.y_step = round_step(f.y_max);
    f.y_max = ceil(f.y_max / f.y_step - 1e-9) * f.y_step;
    return f;
}

/* Lines keep a little room at both ends. */
static double x_at(const frame *f, double x) {
    const double margin = 0.04 * PANEL_W;
    return f->left + margin + (x - f->x_min) / (f->x_max - f->x_min) * (PANEL_W - 2 * margin);
}

static double y_at(const frame *f, double y) {
    return f->top + PANEL_H * (1 - y / f->y_max);
}

static double group_at(const frame *f, double group) {
    return f->left + PANEL_W * (group + 0.5) / (double)f->plot->n_groups;
}

static void draw_x_ticks(const frame *f) {
    const double y = f->top + PANEL_H;
    char text[32];
    for (size_t i = 0; f->plot->groups && i < f->plot->n_groups; i++)
        label(f->out, group_at(f, (double)i), y + 18, "text-anchor=\"middle\"", f->plot->groups[i]);
    if (f->plot->groups) return;
    const double step = round_step(f->x_max - f->x_min);
    /* + 0: no tick is called -0 */
    for (double x = ceil(f->x_min / step - 1e-9) * step + 0.0; x <= f->x_max + step * 1e-9;
         x += step) {
        snprintf(text, sizeof text, "%.6g", x);
        line(f->out, x_at(f, x), y, x_at(f, x), y + 5, "class=\"axis\"");
        label(f->out, x_at(f, x), y + 18, "text-anchor=\"middle\"", text);
    }
}

static void draw_axes(const frame *f) {
    FILE *out = f->out;
    const double middle = f->left + PANEL_W / 2, y_middle = f->top + PANEL_H / 2;
    char text[96];
    for (double y = 0; y <= f->y_max + f->y_step * 1e-9; y += f->y_step) {
        line(out, f->left, y_at(f, y), f->left + PANEL_W, y_at(f, y), "class=\"grid\"");
        snprintf(text, sizeof text, "%.6g", y);
        label(out, f->left - 7, y_at(f, y) + 4, "text-anchor=\"end\"", text);
    }
    line(out, f->left, f->top, f->left, f->top + PANEL_H, "class=\"axis\"");
    line(out, f->left, f->top + PANEL_H, f->left + PANEL_W, f->top + PANEL_H, "class=\"axis\"");
    draw_x_ticks(f);
    label(out, middle, f->top - 10, "text-anchor=\"middle\"", f->panel->title);
    label(out, middle, f->top + PANEL_H + 40, "text-anchor=\"middle\"", f->plot->x_label);
    snprintf(text, sizeof text, "text-anchor=\"middle\" transform=\"rotate(-90 %.1f %.1f)\"",
             f->left - 52, y_middle);
    label(out, f->left - 52, y_middle, text, f->plot->y_label);
}

/* ---- series ---- */

static void draw_marker(FILE *out, double x, double y, size_t series) {
    static const char *const shapes[] = {
        "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", /* circle, square, triangle, diamond */
        "M-3.6 -3.6h7.2v7.2h-7.2z", "M0 -4.8L4.5 3.4H-4.5z", "M0 -5L5 0L0 5L-5 0z"};
    fprintf(out, "<path d=\"%s\" transform=\"translate(%.1f %.1f)\" fill=\"%s\"/>\n",
            shapes[(series + series / N_COLOURS) % 4], x, y, colours[series % N_COLOURS]);
}

static void draw_whisker(const frame *f, const neap_plot_point *p, double x, const char *colour) {
    char how[48];
    if (!(p->low < p->high)) return;
    snprintf(how, sizeof how, "stroke=\"%s\"", colour);
    line(f->out, x, y_at(f, p->low), x, y_at(f, p->high), how);
    line(f->out, x - 4, y_at(f, p->low), x + 4, y_at(f, p->low), how);
    line(f->out, x - 4, y_at(f, p->high), x + 4, y_at(f, p->high), how);
}

static void draw_line(const frame *f, size_t number) {
    const neap_plot_series *s = &f->panel->series[number];
    const char *colour = colours[number % N_COLOURS];
    fprintf(f->out, "<polyline fill=\"none\" stroke-width=\"1.8\" stroke=\"%s\" points=\"", colour);
    for (size_t i = 0; i < s->n; i++)
        if (is_drawn(&s->points[i]))
            fprintf(f->out, "%.1f,%.1f ", x_at(f, s->points[i].x), y_at(f, s->points[i].y));
    fputs("\"/>\n", f->out);
    for (size_t i = 0; i < s->n; i++) {
        const neap_plot_point *p = &s->points[i];
        if (!is_drawn(p)) continue;
        draw_whisker(f, p, x_at(f, p->x), colour);
        draw_marker(f->out, x_at(f, p->x), y_at(f, p->y), number);
    }
}

static void draw_bars(const frame *f, size_t number) {
    const neap_plot_series *s = &f->panel->series[number];
    const double group = PANEL_W / (double)f->plot->n_groups * 0.8;
    const double width = group / (double)f->panel->n_series;
    for (size_t i = 0; i < s->n; i++) {
        const neap_plot_point *p = &s->points[i];
        if (!is_drawn(p)) continue;
        const double left = group_at(f, p->x) - group / 2 + (double)number * width;
        fprintf(f->out,
                "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", left,
                y_at(f, p->y), width * 0.92, f->top + PANEL_H - y_at(f, p->y),
                colours[number % N_COLOURS]);
        draw_whisker(f, p, left + width * 0.46, GREY);
    }
}

static void draw_panel(const frame *f) {
    draw_axes(f);
    for (size_t s = 0; s < f->panel->n_series; s++)
        if (f->plot->groups)
            draw_bars(f, s);
        else
            draw_line(f, s);
}

static void draw_legend(FILE *out, const neap_plot_panel *panel, double top) {
    for (size_t s = 0; s < panel->n_series; s++) {
        const double y = top + LEGEND_LINE * (double)s;
        char how[64];
        snprintf(how, sizeof how, "stroke-width=\"1.8\" stroke=\"%s\"", colours[s % N_COLOURS]);
        line(out, LEFT, y, LEFT + 26, y, how);
        draw_marker(out, LEFT + 13, y, s);
        label(out, LEFT + 34, y + 4, "", panel->series[s].name);
    }
}

static void draw(FILE *out, const neap_plot *plot) {
    const double width = (double)plot->n_panels * (PANEL_W + LEFT) + 20;
    const double legend = TOP + PANEL_H + BOTTOM + 6;
    const double height = legend + LEGEND_LINE * (double)plot->panels[0].n_series;
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
            "height=\"%.0f\" font-family=\"sans-serif\" font-size=\"12\" fill=\"" GREY "\">\n"
            "<style>.axis{stroke:" GREY "}.grid{stroke:" GREY ";stroke-opacity:.25}</style>\n",
            width, height, width, height);
    label(out, width / 2, 24, "text-anchor=\"middle\" font-size=\"15\"", plot->title);
    for (size_t i = 0; i < plot->n_panels; i++) {
        const frame f = make_frame(out, plot, i);
        draw_panel(&f);
    }
    draw_legend(out, &plot->panels[0], legend);
    fputs("</svg>\n", out);
}

int neap_plot_write(const char *path, const neap_plot *plot) {
    FILE *out = fopen(path, "we");
    if (!out) return -errno;
    draw(out, plot);
    int err = fflush(out) == 0 && !ferror(out) ? 0 : -errno;
    if (fclose(out) != 0 && !err) err = -errno;
    return err;
}
