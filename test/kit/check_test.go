//go:build unix

package kit

import (
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newWorld returns a ledger with three events of one key, one of another key and one rolled back, and
// matching records.
func newWorld() (*Ledger, []*Record) {
	l := newLedger()
	var records []*Record
	for i, c := range []struct {
		id, key string
		fate    Fate
	}{{"a", "k", Committed}, {"b", "k", Committed}, {"c", "k", Committed}, {"d", "other", Committed}, {"e", "k", Aborted}} {
		own := []event.Header{{Key: "h", Value: []byte{1}}, {Key: "h", Value: nil}}
		l.Add(Entry{NS: "db.outbox", ID: c.id, Key: c.key, Topics: []string{"t"}, Payload: []byte(c.id), Headers: own, Fate: c.fate})
		if c.fate == Committed {
			headers := []kgo.RecordHeader{{Key: "id", Value: []byte(c.id)}, {Key: "type", Value: []byte("x")}, {Key: "h", Value: []byte{1}}, {Key: "h"}}
			records = append(records, &Record{Topic: "t", Offset: int64(i), Key: []byte(c.key), Value: []byte(c.id), Headers: headers})
		}
	}

	return l, records
}

func TestCompareFindsPlantedDifferences(t *testing.T) {
	t.Parallel()
	move := func(r []*Record, from, to int) []*Record {
		x := *r[from]
		r = slices.Insert(slices.Delete(r, from, from+1), to, &x)
		for i := range r {
			c := *r[i]
			c.Offset = int64(i)
			r[i] = &c
		}
		return r
	}

	for name, c := range map[string]struct {
		plant                                      func([]*Record) []*Record
		lost, phantoms, disorder, repeats, changed int
	}{
		"nothing":                             {plant: func(r []*Record) []*Record { return r }},
		"a loss":                              {plant: func(r []*Record) []*Record { return slices.Delete(r, 1, 2) }, lost: 1},
		"a repeat":                            {plant: func(r []*Record) []*Record { c := *r[0]; c.Offset = 9; return append(r, &c) }, repeats: 1},
		"a reorder":                           {plant: func(r []*Record) []*Record { return move(r, 2, 1) }, disorder: 1},
		"another key's order does not matter": {plant: func(r []*Record) []*Record { return move(r, 3, 0) }},
		"a key in two partitions":             {plant: func(r []*Record) []*Record { c := *r[1]; c.Partition = 1; r[1] = &c; return r }, disorder: 2},
		"a rolled back event": {plant: func(r []*Record) []*Record {
			c := *r[0]
			c.Headers = []kgo.RecordHeader{{Key: "id", Value: []byte("e")}}
			return append(r, &c)
		}, phantoms: 1},
		"an unknown event":          {plant: func(r []*Record) []*Record { c := *r[0]; c.Headers = nil; return append(r, &c) }, phantoms: 1},
		"another payload":           {plant: func(r []*Record) []*Record { c := *r[0]; c.Value = []byte("A"); r[0] = &c; return r }, changed: 1},
		"an empty payload for null": {plant: func(r []*Record) []*Record { c := *r[0]; c.Value = nil; r[0] = &c; return r }, changed: 1},
		"a header's null turned empty": {plant: func(r []*Record) []*Record {
			c := *r[0]
			c.Headers = slices.Clone(c.Headers)
			c.Headers[3].Value = []byte{}
			r[0] = &c
			return r
		}, changed: 1},
		"headers turned around": {plant: func(r []*Record) []*Record {
			c := *r[0]
			c.Headers = slices.Clone(c.Headers)
			c.Headers[2], c.Headers[3] = c.Headers[3], c.Headers[2]
			r[0] = &c
			return r
		}, changed: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, records := newWorld()
			v := l.Compare(c.plant(records))
			if len(v.Lost) != c.lost || len(v.Phantoms) != c.phantoms || len(v.Disorder) != c.disorder || len(v.Duplicates) != c.repeats || len(v.Changed) != c.changed {
				t.Errorf("after planting %s: %s", name, v)
			}
		})
	}
}

func TestCompareDistinguishesTenants(t *testing.T) {
	t.Parallel()
	l := newLedger()
	l.Add(Entry{NS: "a.outbox", ID: "1", Key: "k", Topics: []string{"t"}}, Entry{NS: "b.outbox", ID: "1", Key: "k", Topics: []string{"t"}})
	record := func(ns string, offset int64) *Record {
		return &Record{Topic: "t", Offset: offset, Key: []byte("k"), Value: []byte{}, Headers: []kgo.RecordHeader{{Key: "id", Value: []byte("1")}, {Key: "outrelay-ns", Value: namespaceHash(ns)}}}
	}
	if v := l.Compare([]*Record{record("b.outbox", 0), record("a.outbox", 1)}); !v.OK() {
		t.Errorf("the same id in two collections: %s", v)
	}
	if v := l.Compare([]*Record{record("a.outbox", 0), record("a.outbox", 1)}); len(v.Lost) != 1 || len(v.Duplicates) != 1 {
		t.Errorf("the same collection twice: %s", v)
	}
}

func TestHistoryProblemsFindsPlantedViolations(t *testing.T) {
	t.Parallel()
	now := time.Now()
	version := func(owner string, epoch, seq int64, token string, at time.Duration) Version {
		return Version{At: now.Add(at), Changed: []string{"seq"}, Document: lease.Document{
			Owner: owner, Epoch: epoch, Seq: seq, AcquiredAt: now.Add(at), ExpiresAt: now.Add(at + time.Second), Token: resume.TokenOf(token),
		}}
	}

	for name, c := range map[string]struct {
		all  []Version
		want int
	}{
		"a handover":            {[]Version{version("a", 1, 1, "8201", 0), version("", 1, 2, "8201", 1), version("b", 2, 3, "8201", 2)}, 0},
		"an expiry":             {[]Version{version("a", 1, 1, "8201", 0), version("b", 2, 2, "8202", 2*time.Second)}, 0},
		"a theft":               {[]Version{version("a", 1, 1, "8201", 0), version("b", 2, 2, "8202", 500*time.Millisecond)}, 1},
		"a token gone back":     {[]Version{version("a", 1, 1, "8202", 0), version("a", 1, 2, "8201", 1)}, 1},
		"a seq twice":           {[]Version{version("a", 1, 1, "8201", 0), version("a", 1, 1, "8201", 1)}, 1},
		"an epoch gone back":    {[]Version{version("a", 2, 1, "8201", 0), version("a", 1, 2, "8201", 1)}, 1},
		"a write of a zombie":   {[]Version{version("b", 2, 3, "8201", 0), version("a", 2, 4, "8201", 1)}, 1},
		"a write after release": {[]Version{version("a", 1, 1, "8201", 0), version("", 1, 2, "8201", 1), version("", 1, 3, "8201", 1)}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := HistoryProblems(c.all); len(got) != c.want {
				t.Errorf("%d problems, want %d: %q", len(got), c.want, got)
			}
		})
	}
}

func namespaceHash(ns string) []byte {
	h := routing.NamespaceHash(ns)
	return h[:]
}
