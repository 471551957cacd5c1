/* graph: captures that became graphs. */
#ifndef FAN_FAKE_GRAPH_H
#define FAN_FAKE_GRAPH_H

/* fan__graph_forget_all: every graph goes, whoever has it. */
void fan__graph_forget_all(void);

#endif
