//go:build unix

package kit

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/routing"
)

// Verdict is what a comparison of ledger and topics found. Each list holds what went wrong, for people.
type Verdict struct {
	Events     int // committed and to be delivered, times their topics
	Records    int
	Lost       []string // I1: committed, and in no topic
	Phantoms   []string // I2: in a topic, and never committed
	Disorder   []string // I3: the first delivery of an event stands before that of an earlier one of its key
	Duplicates []string // I4: stands more than once
	Changed    []string // I8: other bytes than were appended
}

// OK reports whether nothing went wrong.
func (v Verdict) OK() bool {
	return len(v.Lost)+len(v.Phantoms)+len(v.Disorder)+len(v.Duplicates)+len(v.Changed) == 0
}

func (v Verdict) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d events, %d records: %d lost, %d phantoms, %d out of order, %d duplicates, %d changed",
		v.Events, v.Records, len(v.Lost), len(v.Phantoms), len(v.Disorder), len(v.Duplicates), len(v.Changed))
	for _, list := range [][]string{v.Lost, v.Phantoms, v.Disorder, v.Duplicates, v.Changed} {
		for i, one := range list {
			if i == 5 {
				b.WriteString("\n  …")
				break
			}
			b.WriteString("\n  " + one)
		}
	}
	return b.String()
}

// Compare holds the records of the topics, sorted by offset within each partition, against the ledger. Records of one id
// in several collections are told apart by their header outrelay-ns.
func (l *Ledger) Compare(records []*Record) Verdict {
	entries, dead := l.copyEntries()
	v := Verdict{Records: len(records)}
	index := map[string][]*Entry{}
	for i := range entries {
		index[entries[i].ID] = append(index[entries[i].ID], &entries[i])
	}
	type copyOf struct {
		e     *Entry
		topic string
	}
	first := map[copyOf]*Record{}
	for _, r := range records {
		e := findEntry(index[r.Header("id")], r)
		if e == nil || e.Fate == Aborted || dead[identity{e.NS, e.ID}] {
			v.Phantoms = append(v.Phantoms, fmt.Sprintf("%s holds id %s", formatPlace(r), r.Header("id")))
			continue
		}
		c := copyOf{e, r.Topic}
		if before := first[c]; before != nil {
			v.Duplicates = append(v.Duplicates, fmt.Sprintf("id %s of key %s at %s (producer %d/%d) and at %s (producer %d/%d)",
				e.ID, e.Key, formatPlace(before), before.Producer, before.Epoch, formatPlace(r), r.Producer, r.Epoch))
			continue
		}
		first[c] = r
		if why := describeDifference(e, r); why != "" {
			v.Changed = append(v.Changed, fmt.Sprintf("id %s at %s: %s", e.ID, formatPlace(r), why))
		}
	}
	type scope struct{ ns, key, topic string }
	last := map[scope]*Record{}
	for i := range entries {
		e := &entries[i]
		if e.Fate != Committed || dead[identity{e.NS, e.ID}] {
			continue
		}
		for _, topic := range e.Topics {
			v.Events++
			r := first[copyOf{e, topic}]
			if r == nil {
				v.Lost = append(v.Lost, fmt.Sprintf("id %s of key %s is not in %s", e.ID, e.Key, topic))
				continue
			}
			if e.Unordered {
				continue
			}
			s := scope{e.NS, e.Key, topic}
			if before := last[s]; before != nil && (before.Partition != r.Partition || before.Offset > r.Offset) {
				v.Disorder = append(v.Disorder, fmt.Sprintf("key %s: id %s at %s behind id %s at %s", e.Key, e.ID, formatPlace(r), before.Header("id"), formatPlace(before)))
			}
			last[s] = r
		}
	}
	return v
}

func formatPlace(r *Record) string { return fmt.Sprintf("%s/%d@%d", r.Topic, r.Partition, r.Offset) }

// findEntry is the entry that a record is of.
func findEntry(candidates []*Entry, r *Record) *Entry {
	ns := r.Header("outrelay-ns")
	for _, e := range candidates {
		if ns == "" {
			return e
		}
		if h := routing.NamespaceHash(e.NS); ns == string(h[:]) {
			return e
		}
	}
	return nil
}

// describeDifference says in what a record differs from what was appended: key, payload, the envelope's own headers in their order.
func describeDifference(e *Entry, r *Record) string {
	switch {
	case string(r.Key) != e.Key:
		return fmt.Sprintf("key %q, want %q", r.Key, e.Key)
	case !bytes.Equal(r.Value, e.Payload):
		return fmt.Sprintf("payload of %d bytes, want another one of %d", len(r.Value), len(e.Payload))
	case e.Null != (r.Value == nil):
		return "null and empty payloads are not the same"
	case len(r.Headers) == 0 || r.Headers[0].Key != "id":
		return "the first header is not id"
	}
	own := r.Headers
	for _, want := range e.Headers {
		i := 0
		for i < len(own) && !equalHeader(own[i], want.Key, want.Value) {
			i++
		}
		if i == len(own) {
			return fmt.Sprintf("header %s is missing, out of order or changed", want.Key)
		}
		own = own[i+1:]
	}
	return ""
}

func equalHeader(h kgo.RecordHeader, key string, value []byte) bool {
	return h.Key == key && bytes.Equal(h.Value, value) && (h.Value == nil) == (value == nil)
}

// CompareAtEnd ends the writing side: it waits until every committed event was delivered and all that the topics hold was
// read, and compares. The relays may still run.
func (s *Scene) CompareAtEnd(topics *Topics) Verdict {
	s.tb.Helper()
	ctx, cancel := context.WithTimeout(s.tb.Context(), Patience)
	defer cancel()
	if err := s.Ledger.ResolveUnknown(ctx, s.Client); err != nil {
		s.tb.Fatal(err)
	}
	want := 0
	for _, e := range s.Ledger.ExpectedEntries() {
		want += len(e.Topics)
	}
	topics.waitDeliveries(want) // that they never come is for the comparison to tell
	topics.WaitForEnd()
	return s.Ledger.Compare(topics.AllRecords())
}

// CheckDelivery is Settled, and fails the test unless everything is as promised.
func (s *Scene) CheckDelivery(topics *Topics) Verdict {
	s.tb.Helper()
	v := s.CompareAtEnd(topics)
	if !v.OK() {
		s.tb.Errorf("not as promised: %s", v)
	}
	return v
}
