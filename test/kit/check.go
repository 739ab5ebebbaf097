//go:build unix

package kit

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/demo/check"
)

// Verdict is the result of a comparison of ledger and topics. Each list describes violations of one promise.
type Verdict struct {
	Events     int // committed events that must be delivered, counted once for each topic
	Records    int
	Lost       []string // I1: committed, but not in its topic
	Phantoms   []string // I2: in a topic, but not committed
	Disorder   []string // I3: delivered before an earlier event of its key
	Duplicates []string // I4: more than once in a topic
	Changed    []string // I8: different bytes than appended
}

// OK reports whether there is no violation.
func (v Verdict) OK() bool {
	return len(v.Lost)+len(v.Phantoms)+len(v.Disorder)+len(v.Duplicates)+len(v.Changed) == 0
}

func (v Verdict) String() string {
	var builder strings.Builder
	fmt.Fprintf(&builder, "%d events, %d records: %d lost, %d phantoms, %d out of order, %d duplicates, %d changed",
		v.Events, v.Records, len(v.Lost), len(v.Phantoms), len(v.Disorder), len(v.Duplicates), len(v.Changed))
	for _, list := range [][]string{v.Lost, v.Phantoms, v.Disorder, v.Duplicates, v.Changed} {
		for i, violation := range list {
			if i == 5 {
				builder.WriteString("\n  …")
				break
			}
			builder.WriteString("\n  " + violation)
		}
	}
	return builder.String()
}

// Compare compares the records of the topics with the ledger. records must be sorted by offset within
// each partition. If several collections have an event with the same id, the header outrelay-ns
// identifies the collection of a record.
func (l *Ledger) Compare(records []*Record) Verdict {
	entries, dead := l.copyEntries()
	verdict := Verdict{Records: len(records)}
	checker := check.New(check.Options{})
	byID := map[string][]*Entry{}
	for i := range entries {
		entry := &entries[i]
		byID[entry.ID] = append(byID[entry.ID], entry)
		checker.Begin(check.Event{ID: entry.checkID(), Key: entry.checkKey(), Topics: entry.Topics})
		switch {
		case entry.Fate == Aborted || dead[identity{entry.NS, entry.ID}]:
			checker.Aborted(entry.checkID())
		case entry.Fate == Unknown:
			checker.Unknown(entry.checkID())
		default:
			checker.Committed(entry.At, entry.checkID())
			verdict.Events += len(entry.Topics)
		}
	}

	type delivery struct {
		e     *Entry
		topic string
	}
	first := map[delivery]*Record{}
	for _, r := range records {
		entry := findEntry(byID[r.Header(record.HeaderID)], r)
		if entry == nil {
			verdict.Phantoms = append(verdict.Phantoms, fmt.Sprintf("%s holds id %s", formatPlace(r), r.Header(record.HeaderID)))
			continue
		}

		before := first[delivery{entry, r.Topic}]
		switch checker.Delivered(check.Delivery{ID: entry.checkID(), Key: entry.checkKey(), Topic: r.Topic, Partition: int(r.Partition), Offset: r.Offset}) {
		case check.Phantom:
			verdict.Phantoms = append(verdict.Phantoms, fmt.Sprintf("%s holds id %s, whose topics are %q", formatPlace(r), entry.ID, entry.Topics))
			continue
		case check.Duplicate:
			verdict.Duplicates = append(verdict.Duplicates, fmt.Sprintf("id %s of key %s at %s (producer %d/%d) and at %s (producer %d/%d)",
				entry.ID, entry.Key, formatPlace(before), before.Producer, before.Epoch, formatPlace(r), r.Producer, r.Epoch))
			continue
		case check.Disordered:
			verdict.Disorder = append(verdict.Disorder, fmt.Sprintf("key %s: id %s at %s is after a later event, or in another partition", entry.Key, entry.ID, formatPlace(r)))
		case check.First, check.Repeated, check.Foreign:
		}

		first[delivery{entry, r.Topic}] = r
		if why := describeDifference(entry, r); why != "" {
			verdict.Changed = append(verdict.Changed, fmt.Sprintf("id %s at %s: %s", entry.ID, formatPlace(r), why))
		}
	}

	for _, m := range checker.Missing() {
		verdict.Lost = append(verdict.Lost, fmt.Sprintf("event %q of key %q is not in %s", m.ID, m.Key, m.Topic))
	}
	return verdict
}

// checkID returns the id of the envelope for the checker: ids are unique within a collection.
func (e *Entry) checkID() string { return e.NS + " " + e.ID }

// checkKey returns the key for the checker: keys are ordered within a collection, except for scheduled events.
func (e *Entry) checkKey() string {
	if e.Unordered {
		return e.checkID()
	}
	return e.NS + " " + e.Key
}

func formatPlace(record *Record) string {
	return fmt.Sprintf("%s/%d@%d", record.Topic, record.Partition, record.Offset)
}

// findEntry returns the entry of a record, or nil.
func findEntry(candidates []*Entry, rec *Record) *Entry {
	ns := rec.Header(record.HeaderNamespace)
	for _, e := range candidates {
		if ns == "" {
			return e
		}
		if hash := routing.NamespaceHash(e.NS); ns == string(hash[:]) {
			return e
		}
	}
	return nil
}

// describeDifference returns the first difference between a record and the appended event, or "". It
// compares the key, the payload and the headers of the envelope in their order.
func describeDifference(entry *Entry, rec *Record) string {
	switch {
	case string(rec.Key) != entry.Key:
		return fmt.Sprintf("key %q, want %q", rec.Key, entry.Key)
	case !bytes.Equal(rec.Value, entry.Payload):
		return fmt.Sprintf("payload of %d bytes differs, want %d bytes", len(rec.Value), len(entry.Payload))
	case entry.Null != (rec.Value == nil):
		return "payload is null instead of empty, or empty instead of null"
	case len(rec.Headers) == 0 || rec.Headers[0].Key != record.HeaderID:
		return "the first header is not id"
	}

	own := rec.Headers
	for _, want := range entry.Headers {
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

func equalHeader(header kgo.RecordHeader, key string, value []byte) bool {
	return header.Key == key && bytes.Equal(header.Value, value) && (header.Value == nil) == (value == nil)
}

// CompareAtEnd waits until all committed events are delivered and all records in the topics are read,
// and compares them. Nothing may be appended after it. The relays may still run.
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

	// If deliveries are missing, the comparison reports them.
	topics.waitDeliveries(want)
	topics.WaitForEnd()
	return s.Ledger.Compare(topics.AllRecords())
}

// WaitDelivered waits until all events that are committed now and belong to the topics of these aggregate types are delivered.
func (s *Scene) WaitDelivered(topics *Topics, types ...string) {
	s.tb.Helper()
	type place struct{ topic, id string }
	var existing []string
	for _, t := range types {
		existing = append(existing, s.TopicOf(t))
	}
	missing := map[place]bool{}
	for _, e := range s.Ledger.ExpectedEntries() {
		for _, topic := range e.Topics {
			if slices.Contains(existing, topic) {
				missing[place{topic, e.ID}] = true
			}
		}
	}

	read := 0
	topics.waitFor("the delivery of all committed events", func() (bool, string) {
		for ; read < len(topics.records); read++ {
			delete(missing, place{topics.records[read].Topic, topics.records[read].Header(record.HeaderID)})
		}
		for p := range missing {
			return false, fmt.Sprintf("%d events are missing, such as %s in %s", len(missing), p.id, p.topic)
		}
		return true, ""
	})
}

// CheckDelivery is CompareAtEnd, and fails the test if a promise is violated.
func (s *Scene) CheckDelivery(topics *Topics) Verdict {
	s.tb.Helper()
	verdict := s.CompareAtEnd(topics)
	if !verdict.OK() {
		s.tb.Errorf("promises are violated: %s", verdict)
	}
	return verdict
}
