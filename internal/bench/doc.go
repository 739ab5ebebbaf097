// Package bench measures the relay against the servers' own limits, in one run on the same servers: the raw change stream,
// the raw produce rate, both at once, the drain of a backlog through the relay as a process of its own, and the latency
// from an acknowledged insert to a consumer, beside the latency of a bare change stream.
//
// What is measured runs in child processes, so that memory, CPU and collections of garbage are theirs alone; Child is
// their side. Runs are interleaved and medians are reported, because a server's own cost per event drifts by a third from
// minute to minute. The CPU time that neither the servers nor the benchmark used is reported as foreign: above a few per
// cent no figure says much.
//
// Cost: the defaults take about six minutes and 2 GB of disk. A cancelled context ends every child. Process figures come
// from /proc; elsewhere than on Linux, CPU and peak memory are those of the whole life of the relay's process, and foreign CPU
// is not known.
package bench
