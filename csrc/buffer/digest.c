/* Digests of values: on the host at once; on devices copies, which are read at the end.
 *
 * First the list of copies; then copying and reading; last the line. */
#include "buffer/digest.h"

#include "array/digest.h"
#include "base/mem.h"

#include <pthread.h>

/* ---- the list ---- */

/* A digest that is read later. */
typedef struct digest_entry {
    uint64_t number;
    fan_array *copy;    /* held; NULL: it is read */
    fan_stream *stream; /* held: where the copy is made */
    uint64_t digest;    /* 0: not read, or it could not be */
} digest_entry;

/* All entries, their numbers ascend. Guarded by the lock, which is held across no call. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static digest_entry *entries;
static size_t nentries, cap;
static uint64_t newest;
static size_t traces;

/* entry_add: takes both holds and returns the entry's number; 0: out of memory, nothing is taken.
 */
static uint64_t entry_add(fan_array *copy, fan_stream *stream)
{
    uint64_t number = 0;
    pthread_mutex_lock(&lock);
    if (fan_grow((void **)&entries, &cap, nentries + 1, sizeof *entries) == 0) {
        number = ++newest;
        entries[nentries++] = (digest_entry){number, copy, stream, 0};
    }
    pthread_mutex_unlock(&lock);
    return number;
}

/* entry_take: moves the holds of the first entry that is not read to *out. false: there is none. */
static bool entry_take(digest_entry *out)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < nentries && !found; i++) {
        if (!entries[i].copy)
            continue;
        *out = entries[i];
        entries[i].copy = NULL;
        entries[i].stream = NULL;
        found = true;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* entry_find: with the lock; NULL: there is none. */
static digest_entry *entry_find(uint64_t number)
{
    size_t low = 0;
    size_t high = nentries;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (entries[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == nentries || entries[low].number != number)
        return NULL;
    return &entries[low];
}

void fan_digests_hold(void)
{
    pthread_mutex_lock(&lock);
    traces++;
    pthread_mutex_unlock(&lock);
}

void fan_digests_drop(void)
{
    digest_entry *gone = NULL;
    size_t n = 0;
    pthread_mutex_lock(&lock);
    if (--traces == 0) {
        gone = entries;
        n = nentries;
        entries = NULL;
        nentries = 0;
        cap = 0;
    }
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < n; i++) {
        fan_array_drop(gone[i].copy);
        fan_stream_drop(gone[i].stream);
    }
    fan_free(gone);
}

uint64_t fan_digest_later(uint64_t number)
{
    uint64_t digest = 0;
    pthread_mutex_lock(&lock);
    const digest_entry *entry = entry_find(number);
    if (entry)
        digest = entry->digest;
    pthread_mutex_unlock(&lock);
    return digest;
}

/* ---- copies ---- */

/* copy_queue: queues a copy of device memory on `on`; the caller's hold on it. */
static fan_status copy_queue(const fan_value *v, fan_stream *on, fan_array **copy, fan_error *err)
{
    const fan_array *a = v->array;
    FAN_TRY(fan_memory_record_stream(a->storage, on, err));
    FAN_TRY(fan_device_array(v->device, on, a->dtype, a->ndim, a->shape, NULL, copy, err));
    const fan_operand in = {.array = a, .acc = a->dtype};
    const fan_job job = {
        .kind = FAN_JOB_COPY,
        .out = *copy,
        .in = &in,
        .n = 1,
        .label = "digest",
    };
    fan_status status = fan_device_run(v->device, on, &job, err);
    if (status != FAN_OK) {
        fan_array_drop(*copy);
        *copy = NULL;
    }
    return status;
}

/* copy_read: the digest of a copy; 0: it cannot be read. */
static uint64_t copy_read(const digest_entry *entry)
{
    fan_error err;
    fan_array *host = NULL;
    uint64_t digest = 0;
    const fan_backend *backend = entry->stream->device->backend;
    err.text[0] = '\0';
    if (fan_array_like(entry->copy, &host, &err) != FAN_OK)
        return 0;
    if (backend->read(entry->stream, host, entry->copy, &err) == FAN_OK)
        digest = fan_digest_array(host);
    fan_array_drop(host);
    return digest;
}

void fan_digests_settle(void)
{
    digest_entry entry;
    while (entry_take(&entry)) {
        uint64_t digest = copy_read(&entry);
        fan_array_drop(entry.copy);
        fan_stream_drop(entry.stream);
        pthread_mutex_lock(&lock);
        digest_entry *found = entry_find(entry.number);
        if (found)
            found->digest = digest;
        pthread_mutex_unlock(&lock);
    }
}

/* ---- the line ---- */

/* on_device: queues what is needed for the digest of a value on a device with streams. Returns the
 * reason why there is none; NULL: line->event has its number. */
static const char *on_device(const fan_value *v, fan_stream *on, fan_trace_line *line)
{
    fan_error err;
    fan_array *copy = NULL;
    uint64_t capture = 0;
    const char *reason = "out of memory";
    err.text[0] = '\0';
    if (v->form == FAN_FORM_PARTIAL)
        return "partial on a device";
    if (v->form != FAN_FORM_DENSE)
        return "sparse on a device";
    if (on && on->device != v->device)
        return "its consumer is on another device";
    fan_stream *stream = fan_stream_hold(on);
    if (!stream)
        stream = fan_stream_current(v->device);
    if (!stream)
        return reason;
    bool is_readable = fan_stream_capture(stream, &capture, &err) == FAN_OK;
    if (!is_readable || capture)
        reason = "recorded";
    else if (copy_queue(v, stream, &copy, &err) == FAN_OK)
        line->event = entry_add(copy, stream);
    if (line->event)
        return NULL;
    fan_array_drop(copy);
    fan_stream_drop(stream);
    return reason;
}

/* on_host: the digest of a value on the host; 0: it has none. */
static uint64_t on_host(const fan_value *v)
{
    switch (v->form) {
    case FAN_FORM_DENSE:
        return fan_digest_array(v->array);
    case FAN_FORM_SPARSE:
        return fan_digest_sparse(v->sparse);
    case FAN_FORM_PARTIAL:
        return fan_digest_partial(v->patch, v->array);
    case FAN_FORM_ZERO:
        return fan_digest_zero(v->array);
    default:
        return 0;
    }
}

/* A text that is written piece by piece: snprintf would take as long as the digest of a small
 * array. */
typedef struct digest_text {
    char *at;
    char *end; /* of the room, but for the terminator */
} digest_text;

static void text_add(digest_text *text, const char *piece)
{
    while (*piece && text->at < text->end)
        *text->at++ = *piece++;
    *text->at = '\0';
}

static void text_add_number(digest_text *text, int64_t number)
{
    char digits[24];
    char *first = digits + sizeof digits - 1;
    *first = '\0';
    do {
        *--first = (char)('0' + number % 10);
        number /= 10;
    } while (number);
    text_add(text, first);
}

/* text_add_shape: "(3, 4)", "(3,)", "()". */
static void text_add_shape(digest_text *text, int ndim, const int64_t *shape)
{
    text_add(text, "(");
    for (int i = 0; i < ndim; i++) {
        if (i)
            text_add(text, " ");
        text_add_number(text, shape[i]);
        if (i + 1 < ndim || ndim == 1)
            text_add(text, ",");
    }
    text_add(text, ")");
}

/* describe: writes what the value is: "float32 (3, 4)". */
static void describe(const fan_value *v, digest_text *text)
{
    switch (v->form) {
    case FAN_FORM_UNDEFINED:
        text_add(text, "None");
        return;
    case FAN_FORM_OBJECT:
        text_add(text, "object");
        return;
    case FAN_FORM_SPARSE:
        text_add(text, fan_format_name(v->sparse->format));
        text_add(text, " ");
        text_add(text, fan_dtype_name(v->dtype));
        text_add(text, " ");
        text_add_shape(text, v->sparse->ndim, v->sparse->shape);
        return;
    case FAN_FORM_PARTIAL:
        text_add(text, "partial ");
        text_add(text, fan_dtype_name(v->dtype));
        text_add(text, " ");
        text_add_shape(text, v->patch->ndim, v->patch->shape);
        return;
    case FAN_FORM_ZERO:
        text_add(text, "zero ");
        break;
    case FAN_FORM_DENSE:
        break;
    }
    text_add(text, fan_dtype_name(v->dtype));
    text_add(text, " ");
    text_add_shape(text, v->array->ndim, v->array->shape);
}

void fan_digest_fill(const fan_value *v, fan_stream *on, uint64_t known, fan_trace_line *line)
{
    const char *reason = NULL;
    bool has_elements = v->form != FAN_FORM_ZERO;
    bool has_streams = has_elements && v->device && v->device->backend->has_streams;
    line->bytes = fan_value_bytes(v);
    digest_text text = {line->label, line->label + sizeof line->label - 1};
    describe(v, &text);
    if (v->form == FAN_FORM_UNDEFINED)
        return;
    if (v->form == FAN_FORM_OBJECT)
        reason = "an object of its own";
    else if (known)
        line->digest = known;
    else if (has_streams)
        reason = on_device(v, on, line);
    else if (fan_storage_redirected())
        reason = "recorded";
    else
        line->digest = on_host(v);
    if (!reason)
        return;
    text_add(&text, ": no digest: ");
    text_add(&text, reason);
}
