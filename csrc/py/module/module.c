/* module: fanin._core. In this order: its types and exceptions; what runs at import; the module's
 * state for the collector. */
#include "py/base/api_failure.h"
#include "py/buffer/buffer_object.h"

#include "py/declared/docs.h"

/* A copy of the tree may lack the files of a part (docs/design.md, The parts). Then its addresses
 * are NULL, and the module has neither its types nor its functions. */
#pragma weak fan_machine_spec
#pragma weak fan_search_functions
#pragma weak fan_graph_tree_spec
#pragma weak fan_graph_function_spec
#pragma weak fan_graph_step_spec
#pragma weak fan_graph_pipeline_spec
#pragma weak fan_cpu_kernel_functions
#pragma weak fan_analysis_functions
#pragma weak fan_machine_tests_functions
#pragma weak fan_api_table

/* X(spec, field, name): the types. */
#define TYPE_LIST(X)                                                 \
    X(fan_buffer_spec, buffer_type, "InputBuffer")                   \
    X(fan_stream_spec, stream_type, "Stream")                        \
    X(fan_event_spec, event_type, "Event")                           \
    X(fan_array_spec, array_type, "Array")                           \
    X(fan_machine_spec, machine_type, "Machine")                     \
    X(fan_trace_spec, trace_type, "Trace")                           \
    X(fan_target_spec, target_type, "Target")                        \
    X(fan_exporter_spec, exporter_type, "_Exporter")                 \
    X(fan_graph_tree_spec, graph_tree_type, "GraphTree")             \
    X(fan_graph_function_spec, graph_function_type, "GraphFunction") \
    X(fan_graph_step_spec, graph_step_type, "GraphStep")             \
    X(fan_graph_pipeline_spec, graph_pipeline_type, "CorePipeline")  \
    X(fan_function_spec, function_type, "CFunction")                 \
    X(fan_node_spec, node_type, "Node")                              \
    X(fan_leaf_spec, leaf_type, "Leaf")                              \
    X(fan_pass_walk_spec, walk_type, "Walk")                         \
    X(fan_event_count_spec, event_count_type, "EventCount")          \
    X(fan_block_spec, block_type, "Block")

/* X(field, name, base): the exceptions of one base; core.pyi has their docstrings. */
#define ERROR_LIST(X)                                  \
    X(race_error, RaceError, PyExc_RuntimeError)       \
    X(device_error, DeviceError, PyExc_RuntimeError)   \
    X(capture_error, CaptureError, PyExc_RuntimeError) \
    X(mismatch_warning, StreamMismatchWarning, PyExc_RuntimeWarning)

static int add_types(PyObject *m, fan_state *st)
{
    const struct {
        PyType_Spec *spec;
        PyTypeObject **field;
        const char *name;
    } types[] = {
#define X(spec, field, name) {&spec, &st->field, name},
        TYPE_LIST(X)
#undef X
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (!types[i].spec)
            continue;
        PyObject *type = PyType_FromModuleAndSpec(m, types[i].spec, NULL);
        *types[i].field = (PyTypeObject *)type;
        if (!type)
            return -1;
        if (PyModule_AddObjectRef(m, types[i].name, type) < 0)
            return -1;
    }
    st->buffer_type->tp_vectorcall = fan_buffer_call;
    st->node_type->tp_vectorcall = fan_node_call;
    st->leaf_type->tp_vectorcall = fan_leaf_call;
    return 0;
}

/* add_new: takes `o`; NULL: after an error. -1 with an exception. */
static int add_new(PyObject *m, const char *name, PyObject *o)
{
    if (!o)
        return -1;
    int bad = PyModule_AddObjectRef(m, name, o);
    Py_DECREF(o);
    return bad;
}

/* new_error: a class of several bases, whose reference is taken; -1 with an exception. */
static int new_error(PyObject *m, PyObject **field, const char *name, PyObject *bases,
                     const char *doc)
{
    if (!bases)
        return -1;
    *field = PyErr_NewExceptionWithDoc(name, doc, bases, NULL);
    Py_DECREF(bases);
    if (!*field)
        return -1;
    return PyModule_AddObjectRef(m, strchr(name, '.') + 1, *field);
}

static int add_errors(PyObject *m, fan_state *st)
{
#define X(field, name, base)                                                           \
    st->field = PyErr_NewExceptionWithDoc("fanin." #name, FAN_DOC_##name, base, NULL); \
    if (!st->field || PyModule_AddObjectRef(m, #name, st->field) < 0)                  \
        return -1;
    ERROR_LIST(X)
#undef X
    if (new_error(m, &st->device_oom_error, "fanin.DeviceOutOfMemoryError",
                  PyTuple_Pack(2, st->device_error, PyExc_MemoryError),
                  FAN_DOC_DeviceOutOfMemoryError) < 0)
        return -1;
    return new_error(m, &st->dtype_error, "fanin.DTypeError",
                     PyTuple_Pack(3, PyExc_ValueError, PyExc_TypeError, PyExc_BufferError),
                     FAN_DOC_DTypeError);
}

static int module_exec(PyObject *m)
{
    fan_state *st = PyModule_GetState(m);
    PyMethodDef *const tables[] = {
        fan_add_n_functions,     fan_stream_functions,        fan_search_functions,
        fan_options_functions,   fan_exchange_functions,      fan_overlap_functions,
        fan_analysis_functions,  fan_cuda_functions,          fan_backends_functions,
        fan_pass_functions,      fan_walk_functions,          fan_collector_functions,
        fan_producers_functions, fan_cpu_kernel_functions,    fan_window_functions,
        fan_ranks_functions,     fan_float_mode_functions,    fan_add_rows_functions,
        fan_elements_functions,  fan_requests_functions,

#ifdef FAN_TEST
        fan_for_tests_functions, fan_machine_tests_functions,
#endif
    };
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        return fan_set_error(PyExc_ImportError,
                             "fanin is of the main interpreter alone, as NumPy is");
    }
    fan_cuda_compile_in_python();
    if (fan_numpy_import() < 0)
        return -1;
    st->budget = FAN_BUDGET_AUTO; /* D23 */
    fan_state_link(st);
    st->zero = PyLong_FromLong(0);
    if (!st->zero)
        return -1;
#define X(field, name)                                   \
    if (!(st->field = PyUnicode_InternFromString(name))) \
        return -1;
    FAN_NAME_LIST(X)
#undef X
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (tables[i] && PyModule_AddFunctions(m, tables[i]) < 0)
            return -1;
    }
    if (add_errors(m, st) < 0)
        return -1;
    if (add_types(m, st) < 0)
        return -1;
    if (PyModule_AddIntConstant(m, "FROM_NDARRAY", FAN_FROM_NDARRAY) < 0)
        return -1;
    if (PyModule_AddIntConstant(m, "FROM_SPARSE", FAN_FROM_FANIN_SPARSE) < 0)
        return -1;
    if (PyModule_AddIntConstant(m, "FROM_FOREIGN", FAN_FROM_FOREIGN) < 0)
        return -1;
    /* the function table of include/fanin.h */
    void *api = (void *)(uintptr_t)&fan_api_table;
    if (!api)
        return 0;
    return add_new(m, "_C_API", PyCapsule_New(api, FANIN_CAPSULE, NULL));
}

static int module_traverse(PyObject *m, visitproc visit, void *arg)
{
    fan_state *st = PyModule_GetState(m);
#define X(type, field) Py_VISIT(st->field);
    FAN_STATE_LIST(X)
#undef X
    for (int d = 0; d < FAN_DT_COUNT; d++)
        Py_VISIT(st->ml_types[d]);
    return 0;
}

static int module_clear(PyObject *m)
{
    fan_state *st = PyModule_GetState(m);
    fan_buffer_freelist_free(st);
    for (size_t i = 0; i < FAN_CALL_SITES; i++)
        Py_CLEAR(st->call_sites[i].code);
#define X(type, field) Py_CLEAR(st->field);
    FAN_STATE_LIST(X)
#undef X
#define X(field, name) Py_CLEAR(st->field);
    FAN_NAME_LIST(X)
#undef X
    st->has_ml_types = false;
    for (int d = 0; d < FAN_DT_COUNT; d++)
        Py_CLEAR(st->ml_types[d]);
    return 0;
}

static void module_free(void *m)
{
    fan_state *st = PyModule_GetState(m);
    if (!st)
        return;
    module_clear(m);
    fan_state_unlink(st);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "fanin._core",
    .m_doc = "The C core of fanin. Its public names are in the package fanin.",
    .m_size = sizeof(fan_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void); /* the one symbol that the library shows */

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module);
}
