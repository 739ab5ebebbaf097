// Package bench holds the Go benchmarks of the hot path, and what crosses packages of the benchmark command: a test that it works
// on real servers and prints what it says it prints.
package bench
