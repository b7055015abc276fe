/* plot.h - figures of the benchmarks: panels side by side with lines or bars, as SVG. Readable on a
 * light and on a dark page; series differ in colour and in marker.
 * Errors    0 or -errno. */
#ifndef NEAP_APPS_PLOT_H
#define NEAP_APPS_PLOT_H

#include <stdbool.h>
#include <stddef.h>

#define NEAP_PLOT_SERIES_MAX 16

typedef struct neap_plot_point {
    double x, y;
    double low, high; /* whisker around y; both equal to y: none */
} neap_plot_point;

typedef struct neap_plot_series {
    const char *name; /* in the legend: the same in all panels for the same number of the series */
    const neap_plot_point *points; /* by x; n 0: none in this panel */
    size_t n;
} neap_plot_series;

typedef struct neap_plot_panel {
    const char *title;
    neap_plot_series series[NEAP_PLOT_SERIES_MAX];
    size_t n_series;
} neap_plot_panel;

typedef struct neap_plot {
    const char *title, *x_label, *y_label;
    const neap_plot_panel *panels;
    size_t n_panels;
    /* Bars: a group for each name, x of a point is the number of its name. NULL: lines over x. */
    const char *const *groups;
    size_t n_groups;
} neap_plot;

/* Each panel has a y axis of its own, from 0 up. Values that are not finite are left out. */
int neap_plot_write(const char *path, const neap_plot *plot);
#endif
