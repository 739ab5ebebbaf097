package scheduled

import (
	"container/heap"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// dueEnvelope is a claimed envelope.
type dueEnvelope struct {
	waiting.Claimed
	due       int64     // due time in Unix milliseconds
	sendAt    time.Time // the due time by the clock of this process
	stamp     bson.Timestamp
	rejection *record.Rejection // why it cannot be sent, or nil

	flight *flight
	index  int32 // in the claim
}

// flight is a claim whose envelopes do not all have outcomes.
type flight struct {
	id        string
	envelopes []dueEnvelope

	mu      sync.Mutex
	left    int // envelopes without an outcome
	tickets []record.Ticket
}

func newFlight(id string) *flight { return &flight{id: id} }

// land records the outcome of one envelope, and its ticket unless it is 0. It reports whether it was the last one.
func (f *flight) land(ticket record.Ticket) (last bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ticket != 0 {
		f.tickets = append(f.tickets, ticket)
	}
	f.left--
	return f.left == 0
}

// held holds claimed envelopes until they are due, in the order of their due times.
type held struct {
	wake chan struct{} // holds one token: the first envelope has changed

	mu   sync.Mutex
	runs runHeap
}

// run has envelopes in the order of their due times. It is never empty.
type run []*dueEnvelope

// hold adds envelopes in any order.
func (h *held) hold(list []*dueEnvelope) {
	if len(list) == 0 {
		return
	}
	slices.SortStableFunc(list, func(a, b *dueEnvelope) int { return a.sendAt.Compare(b.sendAt) })
	h.mu.Lock()
	heap.Push(&h.runs, run(list))
	h.mu.Unlock()
	retry.Signal(h.wake)
}

// takeDue removes up to n envelopes that are due by now, and returns them. If it returns none, next is when the first is due, or some time later
// if there is none.
func (h *held) takeDue(now time.Time, n int) (list []*dueEnvelope, next time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()

	for len(h.runs) > 0 && len(list) < n {
		first := h.runs[0]
		if now.Before(first[0].sendAt) {
			return list, first[0].sendAt
		}
		list = append(list, first[0])
		if len(first) == 1 {
			heap.Pop(&h.runs)
			continue
		}
		// The array must not keep envelopes that have landed.
		first[0], h.runs[0] = nil, first[1:]
		heap.Fix(&h.runs, 0)
	}
	return list, now.Add(maxIdle)
}

// count returns for how many envelopes matches returns true.
func (h *held) count(matches func(*dueEnvelope) bool) (n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.runs {
		for _, e := range r {
			if matches(e) {
				n++
			}
		}
	}
	return n
}

// withdraw removes the envelopes for which matches returns true, and returns them.
func (h *held) withdraw(matches func(*dueEnvelope) bool) (list []*dueEnvelope) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var kept runHeap

	for _, r := range h.runs {
		var rest run
		for _, e := range r {
			if matches(e) {
				list = append(list, e)
			} else {
				rest = append(rest, e)
			}
		}
		if len(rest) > 0 {
			kept = append(kept, rest)
		}
	}
	h.runs = kept
	heap.Init(&h.runs)
	return list
}

// runHeap is ordered by the due times of the first envelopes.
type runHeap []run

func (h runHeap) Len() int           { return len(h) }
func (h runHeap) Less(i, j int) bool { return h[i][0].sendAt.Before(h[j][0].sendAt) }
func (h runHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *runHeap) Push(pushed any)   { *h = append(*h, pushed.(run)) }

func (h *runHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return last
}
