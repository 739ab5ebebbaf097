package reconciler

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// chaos is one round of envelopes that begin to wait, fail, park and are taken over by other owners.
type chaos struct {
	*scene
	r    *rand.Rand
	term *term
	n    int
	want map[string][]string // topics by id
	sick map[string]bool     // topics in quarantine: this owner could not read them

	mu    sync.Mutex
	fails map[string]int // rejections that are still to come, by topic and id
}

var chaosTopics = []string{"a", "b", "c"}

// TestN15_NothingIsLostDoubledOrOvertaken lets owners die at any moment, topics park, and records be rejected, while envelopes begin to wait.
func TestN15_NothingIsLostDoubledOrOvertaken(t *testing.T) {
	t.Parallel()
	for range 3 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			h := newScene(t)
			h.flying = 40
			c := &chaos{scene: h, r: rand.New(rand.NewPCG(seed, 1)), want: map[string][]string{}, fails: map[string]int{}}
			h.broker.reject = c.reject

			c.term = h.newTerm().run()
			c.term.out.setReached("")
			for range 50 {
				c.doRandomStep()
			}
			c.waitSettled()
			c.checkDeliveries()
		})
	}
}

func (c *chaos) reject(topic string, w written) *record.Rejection {
	c.mu.Lock()
	defer c.mu.Unlock()
	if k := topic + w.id; c.fails[k] > 0 {
		c.fails[k]--
		return newRejection("not yet")
	}
	return nil
}

func (c *chaos) doRandomStep() {
	topic := chaosTopics[c.r.IntN(len(chaosTopics))]
	switch n := c.r.IntN(20); {
	case n < 8:
		c.appendWaiting(1 + c.r.IntN(25))
	case n < 11:
		c.term.out.park(topic)
	case n < 15:
		c.unpark(topic)
	case n < 16:
		c.takeOver(true)
	default:
		select {
		case <-time.After(time.Duration(c.r.IntN(15)) * time.Millisecond):
		case <-c.t.Context().Done():
		}
	}
}

// appendWaiting stores envelopes of the stream, as the ledger does: first the documents, then the resolved position passes them.
func (c *chaos) appendWaiting(n int) {
	var list []waiting.Entry

	for range n {
		c.n++
		id, key := fmt.Sprintf("e%06d", c.n), fmt.Sprint("k", c.r.IntN(6))
		topics := slices.Clone(chaosTopics)
		c.r.Shuffle(len(topics), func(i, j int) { topics[i], topics[j] = topics[j], topics[i] })
		topics = topics[:1+c.r.IntN(len(topics))]
		c.want[id] = topics

		for _, topic := range topics {
			c.term.out.closeGate(c.ns(), topic, key)
		}

		c.mu.Lock()
		switch c.r.IntN(15) {
		case 0:
			c.fails[topics[0]+id] = 1 + c.r.IntN(2)
		case 1:
			c.fails[topics[0]+id] = 1000
		}
		c.mu.Unlock()

		e := c.newEntry(c.n, key, []waiting.Reason{waiting.Blocked, waiting.Parked, waiting.Retry}[c.r.IntN(3)], pending(topics...))
		if e.Reason == waiting.Retry {
			e.Attempts, e.Error, e.NextAt = 1, &record.Attempt{Class: record.RecordRejected, Reason: "first", Topic: topics[0]}, time.Now().Add(time.Millisecond)
		}
		list = append(list, e)
	}

	c.enter(list...)
	for i := range list {
		c.term.entered.Put(&list[i])
	}
	if c.r.IntN(3) > 0 {
		c.term.out.setReached(fmt.Sprintf("82%06d", c.n))
	}
}

// takeOver kills the owner and begins the next term with the results of a read-back. With quarantine, it cannot read
// some topics.
func (c *chaos) takeOver(quarantine bool) {
	c.term.out.kill(c.r)
	c.term.stop()
	reached := c.term.out.Reached()
	c.term = c.newTerm()
	c.term.out.setReached(reached)

	c.sick = map[string]bool{}
	for _, topic := range chaosTopics {
		if quarantine && c.r.IntN(3) == 0 {
			c.sick[topic] = true
			c.term.out.park(topic)
		}
	}

	// Otherwise the sink finds them one by one.
	if c.r.IntN(2) == 0 {
		c.term.out.unread = c.sick
		if _, err := c.term.x.FinishSent(c.t.Context()); err != nil {
			c.t.Fatal(err)
		}
	}
	if _, err := c.term.x.Load(c.t.Context(), func(string) bool { return true }, c.term.out.closeGate, func(string, bson.RawValue, string, []string) {}); err != nil {
		c.t.Fatal(err)
	}
	c.term.run()
}

// unpark makes a topic accept records again. Only another takeover releases a topic in quarantine.
func (c *chaos) unpark(topic string) {
	if c.sick[topic] {
		c.takeOver(false)
	}
	c.term.out.unpark(topic)
}

func (c *chaos) waitSettled() {
	c.term.out.setReached("9")

	// With one topic parked, the gates count exactly the waiting envelopes in the collection.
	c.term.out.park("c")
	c.unpark("a")
	c.unpark("b")
	c.waitUntil("the gates count the waiting envelopes that are left", func() bool {
		gates, _ := c.term.out.countGates()
		return maps.Equal(gates, c.countByGate())
	})

	for _, topic := range chaosTopics {
		c.unpark(topic)
	}
	c.waitEmpty()
	c.term.waitWritten()
	if gates, early := c.term.out.countGates(); len(gates) > 0 || early {
		c.t.Errorf("gates %v are closed, one was opened too early: %v", gates, early)
	}
	c.term.stop()
	c.term.out.checkSettled()
}

// countByGate counts the waiting envelopes in the collection by gate.
func (c *chaos) countByGate() map[[3]string]int {
	c.t.Helper()
	cur, err := c.coll.Find(c.t.Context(), bson.D{})
	if err != nil {
		c.t.Fatal(err)
	}
	var docs []bson.Raw
	if err := cur.All(c.t.Context(), &docs); err != nil {
		c.t.Fatal(err)
	}

	n := map[[3]string]int{}
	for _, raw := range docs {
		d := waiting.ReadDocument(raw)
		for _, topic := range d.Pending {
			n[[3]string{c.ns(), topic, d.Key}]++
		}
	}
	return n
}

func (c *chaos) checkDeliveries() {
	c.t.Helper()

	c.broker.checkOrder()
	dead := map[string]bool{}
	cur, err := c.letters.Find(c.t.Context(), bson.D{})
	if err != nil {
		c.t.Fatal(err)
	}

	var list []struct {
		ID string `bson:"id"`
	}
	if err := cur.All(c.t.Context(), &list); err != nil {
		c.t.Fatal(err)
	}

	for _, l := range list {
		dead[l.ID] = true
	}

	there := map[string]bool{}
	for topic, list := range c.broker.topics {
		for _, w := range list {
			there[topic+w.id] = true
		}
	}

	for id, topics := range c.want {
		for _, topic := range topics {
			switch forever := c.fails[topic+id] > 100; {
			case !there[topic+id] && !dead[id]:
				c.t.Errorf("%s is lost for %s", id, topic)
			case there[topic+id] && forever:
				c.t.Errorf("%s was rejected by %s and is in the topic", id, topic)
			case !there[topic+id] && !forever && topic != topics[0] && !slices.ContainsFunc(topics, func(o string) bool { return c.fails[o+id] > 100 }):
				c.t.Errorf("%s died for %s, which takes it", id, topic)
			}
		}
	}

	c.t.Logf("%d waiting envelopes, %d dead", c.n, len(dead))
}
