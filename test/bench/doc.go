// Package bench holds the Go benchmarks of the hot path, and tests of the benchmark command that cover several
// packages: they check that the command runs on real servers and prints its documented output.
package bench
