// Package bench compares the relay with the limits of the servers, in one run on the same servers. It
// measures the raw change stream, the raw produce rate, both concurrently, and the drain of a backlog through
// a relay process. It also measures the latency from an acknowledged insert to a consumer, and that of a bare
// change stream.
//
// Measurements run in child processes, so that memory, CPU and garbage collections are theirs alone. Child is
// the code of such a process. Runs are interleaved and the results are medians, because the cost per event of
// a server drifts by a third from minute to minute. The CPU time that neither the servers nor the benchmark
// used is reported as that of others. Above a few percent, the figures are not meaningful.
//
// Cost: the defaults take about seven minutes and 2 GB of disk. The end of the context ends every child.
// Process figures come from /proc. On other systems than Linux, CPU and peak memory are those of the relay's
// process since its start, and CPU of others is unknown.
package bench
