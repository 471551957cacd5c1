// An array type of one's own in C++, summed by a fanin buffer. own_arrays.py compiles and runs it.
//
// The buffer gets each array as a DLPack tensor whose deleter releases a shared_ptr: no element is copied, and the sum
// of one gradient is the very array that came. A sum goes back into the type the same way.
#include <Python.h>

#include <fanin.h>

#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

static const fanin_api *api;

// Raises what a call of the API says.
static void check(fanin_status status, const fanin_failure &why)
{
    if (status != FANIN_OK)
        throw std::runtime_error(why.text);
}

static fanin_failure failure()
{
    fanin_failure why = {};
    why.struct_size = sizeof why;
    return why;
}

// A matrix of doubles with shared ownership.
class Matrix {
  public:
    Matrix(int64_t rows, int64_t columns, double fill = 0)
        : shape{rows, columns}, data(std::make_shared<std::vector<double>>(static_cast<size_t>(rows * columns), fill))
    {
    }

    double total() const { return std::accumulate(data->begin(), data->end(), 0.0); }
    const void *address() const { return data->data(); }

    // tensor: for fanin; the deleter drops the copy of *this that it holds.
    fanin_managed *tensor() const
    {
        struct ManagerContext {
            fanin_managed managed;
            Matrix matrix;
        };
        auto *context = new ManagerContext{{}, *this};
        context->managed.version = {1, 0};
        context->managed.manager_ctx = context;
        context->managed.deleter = [](fanin_managed *m) { delete static_cast<ManagerContext *>(m->manager_ctx); };
        context->managed.dl_tensor.data = context->matrix.data->data();
        context->managed.dl_tensor.device = {1, 0};
        context->managed.dl_tensor.ndim = 2;
        context->managed.dl_tensor.dtype = {2, 64, 1};
        context->managed.dl_tensor.shape = context->matrix.shape;
        return &context->managed;
    }

  private:
    int64_t shape[2];
    std::shared_ptr<std::vector<double>> data;
};

// A value of fanin's that is dropped with its scope.
class Value {
  public:
    Value() : v{} {}
    explicit Value(const Matrix &m) : v{}
    {
        fanin_failure why = failure();
        check(api->of_managed(m.tensor(), &v, &why), why);
    }
    Value(const Value &) = delete;
    Value &operator=(const Value &) = delete;
    ~Value() { api->drop(&v); }
    fanin_value v;
};

// A buffer of one slot.
class Buffer {
  public:
    Buffer() : b(nullptr)
    {
        fanin_failure why = failure();
        check(api->buffer_new(1, nullptr, &b, &why), why);
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { api->buffer_free(b); }

    void add(const Matrix &m)
    {
        fanin_failure why = failure();
        Value value(m);
        check(api->buffer_add_value(b, 0, &value.v, nullptr, &why), why);
    }
    void take(Value &sum)
    {
        fanin_failure why = failure();
        check(api->buffer_take_one(b, 0, nullptr, &sum.v, &why), why);
    }

  private:
    fanin_buffer *b;
};

// run: (the sum of n matrices as an ndarray, whether the sum of one is that one's memory).
static PyObject *run(PyObject *, PyObject *arg)
{
    try {
        Buffer buffer;
        Value sum, one;
        Matrix single(2, 3, 7);
        for (long k = PyLong_AsLong(arg); k > 0; k--)
            buffer.add(Matrix(2, 3, 1.0 / static_cast<double>(k)));
        buffer.take(sum);
        buffer.add(single);
        buffer.take(one);
        return Py_BuildValue("(NOd)", reinterpret_cast<PyObject *>(api->to_python(&sum.v)),
                             one.v.data == single.address() ? Py_True : Py_False, single.total());
    } catch (const std::exception &e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }
}

// refused: matrices of two shapes.
static PyObject *refused(PyObject *, PyObject *)
{
    try {
        Buffer buffer;
        buffer.add(Matrix(2, 3));
        buffer.add(Matrix(3, 2));
        Py_RETURN_NONE;
    } catch (const std::exception &e) {
        PyErr_SetString(PyExc_ValueError, e.what());
        return nullptr;
    }
}

static PyMethodDef methods[] = {
    {"run", run, METH_O, nullptr}, {"refused", refused, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "own_arrays", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_own_arrays()
{
    api = fanin_import();
    return api ? PyModule_Create(&module) : nullptr;
}
