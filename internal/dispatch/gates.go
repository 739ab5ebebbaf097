package dispatch

import (
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/record"
)

// MaxGates is how many keys may wait one by one. Beyond it every key of their topics waits, so that memory stays bounded.
const MaxGates = 100_000

// gates are N15: the number of exceptions that wait for each (namespace, topic, key). A gate closes when the decision that
// an envelope has to wait is taken, in stream order, and opens when the last of them was sent and written down, or is
// dead; it is never opened by a query, which could miss what is about to be written. Its lock is a leaf.
type gates struct {
	active atomic.Int64 // gates and stopped keys; 0 is the healthy case, which costs one load per record

	mu      sync.Mutex
	max     int
	keys    map[Gate]count
	topics  map[string]int    // how many wait for each topic, over all keys
	wide    bool              // there are too many keys: a topic is one gate, until few are left
	fresh   map[Gate]int      // while they are counted anew: what has closed since; else nil
	stopped map[Gate]struct{} // keys of which a delivery outside of the stream's order came back, which is not yet written down
	total   int
	moves   uint64 // changes of any gate
}

// Gate is the scope of an order: the collection, by the value of its header `outrelay-ns`, the topic, and the key.
type Gate struct {
	NS, Topic, Key string
}

// count is how many wait behind a gate, and when that last changed.
type count struct {
	n    int
	when uint64
}

func newGates(most int) *gates {
	return &gates{max: most, keys: map[Gate]count{}, topics: map[string]int{}, stopped: map[Gate]struct{}{}}
}

// add changes the number that waits behind a gate by n.
func (g *gates) add(ns, topic, key string, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.change(Gate{ns, topic, key}, n)
}

func (g *gates) change(id Gate, n int) {
	topic, had := id.Topic, g.keys[id].n
	if g.wide {
		had = g.topics[topic]
	}
	if had+n < 0 {
		// One that was counted before the gates were loaded anew, or that an audit took off. To take it off its topic would open
		// the gates of other keys.
		return
	}
	g.total += n
	if g.topics[topic] += n; g.topics[topic] == 0 {
		delete(g.topics, topic)
	}
	if g.wide = g.wide && g.total > 0; !g.wide {
		g.moves++
		if left := g.keys[id].n + n; left > 0 {
			g.keys[id] = count{left, g.moves}
		} else {
			delete(g.keys, id)
		}
		if len(g.keys) > g.max {
			g.wide = true
			clear(g.keys)
		}
	}
	g.closing(id, n)
	g.count()
}

func (g *gates) count() { g.active.Store(int64(g.total + len(g.stopped))) }

func (g *gates) forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.keys)
	clear(g.topics)
	g.total, g.wide, g.fresh = 0, false, nil
	g.count()
}

// stop keeps deliveries outside of the stream's order of a key back until resume.
func (g *gates) stop(ns, topic, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped[Gate{ns, topic, key}] = struct{}{}
	g.count()
}

func (g *gates) resume(ns, topic, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.stopped, Gate{ns, topic, key})
	g.count()
}

// namespace is the value of a record's header `outrelay-ns`; nil where records carry none.
func namespace(rec *record.Record) []byte {
	for i := range rec.Headers {
		if string(rec.Headers[i].Key) == "outrelay-ns" {
			return rec.Headers[i].Value
		}
	}
	return nil
}

func (g *gates) closed(rec *record.Record, side bool) error {
	if g.active.Load() == 0 {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	shut := false
	switch id := (Gate{string(namespace(rec)), rec.Topic, string(rec.Key)}); {
	case side:
		_, shut = g.stopped[id]
	case g.wide:
		shut = g.topics[rec.Topic] > 0
	default:
		shut = g.keys[id].n > 0
	}
	if shut {
		return record.ErrBlocked
	}
	return nil
}
