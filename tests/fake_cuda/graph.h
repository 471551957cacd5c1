/* graph: captures that became graphs. */
#ifndef FAN_FAKE_GRAPH_H
#define FAN_FAKE_GRAPH_H

/* fan__graph_forget_all: frees every graph, also those with handles. */
void fan__graph_forget_all(void);

#endif
