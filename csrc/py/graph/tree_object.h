/* tree_object: what the files of graph trees share. */
#ifndef FAN_PY_TREE_OBJECT_H
#define FAN_PY_TREE_OBJECT_H

#include "graph/tree.h"
#include "py/base/py.h"

typedef struct fan_graph_tree_object {
    PyObject_HEAD fan_tree *t; /* held */
    fan_device *d;             /* held */
    PyObject *weakrefs;
    PyObject *held;  /* a list of weak references to outputs that are copied if they live at the end
                      * of the step; NULL: none yet */
    unsigned verify; /* its option: above 0 the functions keep what a recording found outside */
} fan_graph_tree_object;

#define TREES "fanin.graph.trees"     /* the module of their Python part */
#define PICTURE "fanin.graph.picture" /* the one that draws them */
#define PIPELINES "fanin.graph.pipelines"

/* fan_graph_calls: the pipeline that runs on this thread: its tree, and the list that gets the
 * calls of functions; borrowed. tree NULL: there is none. Returns the values of before. */
typedef struct fan_graph_calls {
    const fan_graph_tree_object *tree;
    PyObject *list;
} fan_graph_calls;
fan_graph_calls fan_graph_calls_set(fan_graph_calls now);

/* One call of a pipeline. */
typedef struct fan_graph_run {
    fan_graph_calls outer; /* of the pipeline that runs already */
    bool own;              /* it is a step of its own */
} fan_graph_run;
/* fan_graph_run_begin: begins a step, in which the calls of this thread's functions are listed in
 * `list` (borrowed). */
int fan_graph_run_begin(fan_graph_tree_object *tree, PyObject *list, fan_graph_run *run);
/* fan_graph_run_end: ends the run; -1 also if a held output could not be copied; a live exception
 * stays. Each 0, or -1 with an exception. */
int fan_graph_run_end(fan_graph_tree_object *tree, const fan_graph_run *run);

/* fan_graph_copied: a copy of an array of the tree in its own memory; anything else as it is. */
PyObject *fan_graph_copied(fan_graph_tree_object *tree, PyObject *array);

/* fan_graph_function_make: GraphTree.function, with its parameters. */
PyObject *fan_graph_function_make(fan_graph_tree_object *tree, PyObject *const *a);

#endif
