package activity

import (
	"math/bits"
	"time"
)

// The buckets of latencies: four in each power of two, from 128 µs to about two hours. So a bucket is at most 25 % wide.
const (
	firstBits  = 8 // of the first bucket's microseconds
	octaves    = 26
	buckets    = 4 * octaves
	firstValue = 1 << (firstBits - 1)
)

// histogram counts latencies.
type histogram [buckets]uint32

// add counts n latencies.
func (h *histogram) add(duration time.Duration, n int) {
	us := uint64(max(duration.Microseconds(), firstValue))
	length := bits.Len64(us)
	i := 4*(length-firstBits) + int(us>>(length-3))&3
	h[min(i, buckets-1)] += uint32(n)
}

// upperBound returns the end of a bucket.
func upperBound(i int) time.Duration {
	return time.Duration(4+i%4+1) << (i/4 + firstBits - 3) * time.Microsecond
}

// merge adds the counts of another histogram.
func (h *histogram) merge(other *histogram) {
	for i, n := range other {
		h[i] += n
	}
}

// quantile returns the end of the bucket that contains the quantile fraction, or 0 if nothing was counted.
func (h *histogram) quantile(fraction float64) time.Duration {
	var total uint64
	for _, n := range h {
		total += uint64(n)
	}
	rank := uint64(fraction*float64(total)) + 1

	var below uint64
	for i, n := range h {
		if below += uint64(n); below >= min(rank, total) && below > 0 {
			return upperBound(i)
		}
	}
	return 0
}
