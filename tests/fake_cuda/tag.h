/* tag: addresses of the fake device have this bit, so that no host code can read through them by
 * mistake. */
#ifndef FAN_FAKE_TAG_H
#define FAN_FAKE_TAG_H

#define FAN_FAKE_TAG (UINT64_C(1) << 62)

#endif
