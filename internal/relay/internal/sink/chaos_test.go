package sink

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// flaky cuts connections: before the whole request has arrived, or between the request and its
// response.
type flaky struct {
	net.Conn
	on *atomic.Bool
}

var errChaos = errors.New("chaos: the connection is cut")

func (f *flaky) Write(b []byte) (int, error) {
	if f.on.Load() && len(b) > 200 {
		switch r := rand.IntN(100); {
		case r < 2:
			n, _ := f.Conn.Write(b[:rand.IntN(len(b))])
			_ = f.Conn.Close()
			return n, errChaos
		case r < 5:
			n, err := f.Conn.Write(b)
			if err == nil {
				_ = f.Conn.(*net.TCPConn).CloseWrite()
				_ = f.Conn.SetReadDeadline(time.Now())
			}
			return n, err
		}
	}

	return f.Conn.Write(b)
}

func flakyDial(on *atomic.Bool) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &flaky{c, on}, nil
	}
}

// TestChaos: connections are cut, responses are lost, requests run after their timeout, brokers
// respond with random errors, and leaders move. No record is lost or sent twice, and each key is in
// order.
func TestChaos(t *testing.T) {
	t.Parallel()
	const keys, each, partitions = 100, 60, 12
	var on atomic.Bool
	timeout := 250 * time.Millisecond
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(3), kfake.SeedTopics(partitions, "a"), kfake.SleepOutOfOrder())
	kc.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if on.Load() && rand.IntN(100) < 2 {
			late := time.NewTimer(timeout + kafkawire.ResponseSlack + time.Duration(rand.IntN(100))*time.Millisecond)
			kc.SleepControl(func() { <-late.C })
		}
		return nil, nil, false
	})
	sometimes := func(kmsg.Request) bool { return on.Load() && rand.IntN(100) < 2 }
	for _, e := range []*kerr.Error{
		kerr.RequestTimedOut,
		kerr.NotEnoughReplicasAfterAppend,
		kerr.NotEnoughReplicas,
		kerr.NotLeaderForPartition,
	} {
		kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: e, Count: -1, When: sometimes})
	}

	cfg := testConfig{Brokers: brokers, RequestTimeout: timeout, MaxBatchBytes: 2000, Dial: flakyDial(&on)}
	r := openSink(t, sinkOptions{cfg: cfg})
	on.Store(true)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(60 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				_ = kc.MoveTopicPartition("a", rand.Int32N(partitions), rand.Int32N(3))
			}
		}
	})

	pace := time.NewTicker(15 * time.Millisecond)
	defer pace.Stop()
	for i := range each {
		for k := range keys {
			r.send(t, newRecord("a", fmt.Sprint("key", k), fmt.Sprintf("key%d/%d", k, i)))
			if k%16 == 0 {
				r.Flush()
			}
		}
		r.Flush()
		<-pace.C
	}
	r.acks.waitResolved(keys * each)

	on.Store(false)
	close(stop)
	wg.Wait()
	log := readTopic(t, brokers, "a")
	requireInOrder(t, log, keys, each)

	// Each ack has the offset of its record.
	valueAt := map[place]string{}
	for _, list := range log {
		for _, g := range list {
			valueAt[place{record.TopicPartition{Topic: "a", Partition: g.Partition}, g.Offset}] = string(g.Value)
		}
	}
	for k, at := range r.acks.acked {
		if want := fmt.Sprintf("key%d/%d", int(k)%keys, int(k)/keys); valueAt[at] != want {
			t.Fatalf("ticket %d was acked at %v, which contains %q, want %q", k, at, valueAt[at], want)
		}
	}
}

// TestLeaderMoveIsFollowedAtOnce: the sink does not wait for the regular metadata request.
func TestLeaderMoveIsFollowedAtOnce(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "a"))
	r := openSink(t, fakeOptions(brokers...))
	r.send(t, newRecord("a", "k", "k/0"))
	r.acks.waitResolved(1)

	requireMostlyWithin(t, r, metadataEvery/5, func(int) {
		if err := kc.MoveTopicPartition("a", 0, 1-kc.LeaderFor("a", 0)); err != nil {
			t.Fatal(err)
		}
	})
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 6)
}

// TestHangingLeaderIsLeftWhenItMoves: a request is in flight to a broker that hangs. When the
// leader moves, the same bytes go to the new leader before the timeout of the request.
func TestHangingLeaderIsLeftWhenItMoves(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "a"), kfake.SleepOutOfOrder())
	u := fakeOptions(brokers...)
	u.cfg.RequestTimeout = 2 * testTimeout
	r := openSink(t, u)
	r.send(t, newRecord("a", "k", "k/0"))
	r.acks.waitResolved(1)

	release, hangs := make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	kc.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if first.CompareAndSwap(false, true) {
			kc.DropControl()
			kc.SleepControl(func() {
				close(hangs)
				<-release
			})
		}
		return nil, nil, false
	})

	r.send(t, newRecord("a", "k", "k/1"))
	r.Flush()
	<-hangs
	if err := kc.MoveTopicPartition("a", 0, 1-kc.LeaderFor("a", 0)); err != nil {
		t.Fatal(err)
	}
	// This takes much less time than the timeout of the request.
	r.acks.waitResolved(2)

	close(release)
	requireInOrder(t, readTopic(t, brokers, "a"), 1, 2)
}

// TestN04_SelfMoveGoesOnWithTheNextGeneration: after a move, the next sink uses the next
// generation, and reads back the batch whose outcome is unknown.
func TestN04_SelfMoveGoesOnWithTheNextGeneration(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(1), kfake.SeedTopics(3, "a"))
	txid := "outrelay.test." + stacktest.Name(t)
	first := fakeOptions(brokers...)
	first.txid = txid
	r := openSink(t, first)
	each := func(from, to int) {
		for i := from; i < to; i++ {
			for p := range int32(3) {
				x := newRecord("a", fmt.Sprint("k", p), fmt.Sprintf("k%d/%d", p, i))
				x.Partition = p
				r.send(t, x)
			}
		}
		r.Flush()
	}

	each(0, 5)
	r.acks.waitResolved(15)

	// The outcome of the batch for partition 1 stays unknown: it is read back under the new
	// identity. Partition 2 certainly does not append.
	var lost atomic.Bool
	lost.Store(true)
	for p, e := range map[int32]*kerr.Error{1: kerr.NotEnoughReplicasAfterAppend, 2: kerr.TopicAuthorizationFailed} {
		kc.Fault(kfake.Fault{
			Keys:       []kmsg.Key{kmsg.Produce},
			Topic:      "a",
			Partitions: []int32{p},
			Err:        e,
			Count:      -1,
			When:       func(kmsg.Request) bool { return lost.Load() },
		})
	}
	each(5, 10)
	stacktest.Eventually(t, "both are stuck", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		q := r.topics["a"].partitions[1].queue
		return len(q) > 0 && q[0].maybeAppended && r.topics["a"].partitions[2].tries > 0
	})

	before := r.keeper.session.Generation()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	if err := r.keeper.moveToNextGeneration(ctx); err != nil {
		t.Fatal(err)
	}
	senders, _ := r.claims.readDocument()
	last, generation := senders[len(senders)-1], r.keeper.session.Generation()
	if generation != before+1 || last.Generation != before+1 || last.ID == r.producer.ID {
		t.Fatalf("generation %d, want %d; saved sender %+v, want another id than %+v", generation, before+1, last, r.producer)
	}
	if left := senders[len(senders)-2]; len(left.Open) != 1 || left.Open[0].Partition != 1 || left.ID != r.producer.ID {
		t.Fatalf("the old id is saved as %+v, want it open in partition 1", left)
	}

	_ = r.kill()
	lost.Store(false)
	u := fakeOptions(brokers...)
	u.txid, u.claims = txid, r.claims
	next := openSink(t, u)
	if got := next.keeper.session.Generation(); got != before+1 {
		t.Fatalf("the next sink has generation %d, want %d", got, before+1)
	}

	r = next
	each(0, 12)
	r.acks.waitResolved(36)
	requireInOrder(t, readTopic(t, brokers, "a"), 3, 12)
}
