package kafka

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

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/record"
)

// flaky cuts connections: before a request arrived whole, or after it arrived and before its answer did.
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

// TestChaos cuts connections, loses answers, lets requests run after their time-out, refuses at random and moves leaders
// all the time. Nothing is lost, nothing stands twice, and each key is in order.
func TestChaos(t *testing.T) {
	t.Parallel()
	const keys, each, partitions = 100, 60, 12
	var on atomic.Bool
	timeout := 250 * time.Millisecond
	kc, brokers := fake(t, kfake.NumBrokers(3), kfake.SeedTopics(partitions, "a"), kfake.SleepOutOfOrder())
	kc.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		if on.Load() && rand.IntN(100) < 2 {
			late := time.NewTimer(timeout + responseSlack + time.Duration(rand.IntN(100))*time.Millisecond)
			kc.SleepControl(func() { <-late.C })
		}
		return nil, nil, false
	})
	for _, e := range []*kerr.Error{kerr.RequestTimedOut, kerr.NotEnoughReplicasAfterAppend, kerr.NotEnoughReplicas, kerr.NotLeaderForPartition} {
		kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: e, Count: -1, When: func(kmsg.Request) bool { return on.Load() && rand.IntN(100) < 2 }})
	}
	r := open(t, setUp{cfg: Config{Brokers: brokers, RequestTimeout: timeout, MaxBatchBytes: 2000, Dial: flakyDial(&on)}})
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
			r.send(t, rec("a", fmt.Sprint("key", k), fmt.Sprintf("key%d/%d", k, i)))
			if k%16 == 0 {
				r.Flush()
			}
		}
		r.Flush()
		<-pace.C
	}
	r.acks.resolved(keys * each)
	on.Store(false)
	close(stop)
	wg.Wait()
	log := read(t, brokers, "a")
	inOrder(t, log, keys, each)
	// Each ack names the place where the record stands.
	stands := map[place]string{}
	for _, list := range log {
		for _, g := range list {
			stands[place{record.TopicPartition{Topic: "a", Partition: g.Partition}, g.Offset}] = string(g.Value)
		}
	}
	for k, at := range r.acks.acked {
		if want := fmt.Sprintf("key%d/%d", int(k)%keys, int(k)/keys); stands[at] != want {
			t.Fatalf("ticket %d was acked at %v, where %q stands instead of %q", k, at, stands[at], want)
		}
	}
}

func TestLeaderMoveIsFollowedAtOnce(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "a"))
	r := open(t, onFake(brokers...))
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
	mostly(t, r, metadataEvery/5, func(int) {
		if err := kc.MoveTopicPartition("a", 0, 1-kc.LeaderFor("a", 0)); err != nil {
			t.Fatal(err)
		}
	})
	inOrder(t, read(t, brokers, "a"), 1, 6)
}

// TestHangingLeaderIsLeftWhenItMoves: a request is in flight to a broker that hangs; once the leader is another one, the
// same bytes go there without waiting for the time-out.
func TestHangingLeaderIsLeftWhenItMoves(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(2), kfake.SeedTopics(1, "a"), kfake.SleepOutOfOrder())
	u := onFake(brokers...)
	u.cfg.RequestTimeout = 2 * patient
	r := open(t, u)
	r.send(t, rec("a", "k", "k/0"))
	r.acks.resolved(1)
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
	r.send(t, rec("a", "k", "k/1"))
	r.Flush()
	<-hangs
	if err := kc.MoveTopicPartition("a", 0, 1-kc.LeaderFor("a", 0)); err != nil {
		t.Fatal(err)
	}
	r.acks.resolved(2) // long before the request is given up
	close(release)
	inOrder(t, read(t, brokers, "a"), 1, 2)
}

func TestN04_SelfMoveGoesOnWithTheNextGeneration(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(3, "a"))
	txid := "outrelay.test." + stacktest.Name(t)
	first := onFake(brokers...)
	first.txid = txid
	r := open(t, first)
	each := func(from, to int) {
		for i := from; i < to; i++ {
			for p := range int32(3) {
				x := rec("a", fmt.Sprint("k", p), fmt.Sprintf("k%d/%d", p, i))
				x.Partition = p
				r.send(t, x)
			}
		}
		r.Flush()
	}
	each(0, 5)
	r.acks.resolved(15)
	// Partition 1 says that it may have appended, and never whether it has: its batch is read back under the new identity.
	var lost atomic.Bool
	lost.Store(true)
	kc.Fault(
		kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Partitions: []int32{1}, Err: kerr.NotEnoughReplicasAfterAppend, Count: -1, When: func(kmsg.Request) bool { return lost.Load() }},
		kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: "a", Partitions: []int32{2}, Err: kerr.TopicAuthorizationFailed, Count: -1, When: func(kmsg.Request) bool { return lost.Load() }},
	)
	each(5, 10)
	until(t, "both are stuck", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		q := r.topics["a"].partitions[1].queue
		return len(q) > 0 && q[0].maybeAppended && r.topics["a"].partitions[2].tries > 0
	})
	before := r.session.Generation()
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	if err := r.moveToNextGeneration(ctx); err != nil {
		t.Fatal(err)
	}
	senders, _ := r.claims.document()
	if last := senders[len(senders)-1]; r.session.Generation() != before+1 || last.Generation != before+1 || last.ID == r.producer.ID {
		t.Fatalf("generation %d after %d; saved %+v, sent as %+v", r.session.Generation(), before, last, r.producer)
	}
	if left := senders[len(senders)-2]; len(left.Open) != 1 || left.Open[0].Partition != 1 || left.ID != r.producer.ID {
		t.Fatalf("the id that was left is saved as %+v, want open in the partition in doubt", left)
	}
	_ = r.kill()
	lost.Store(false)
	u := onFake(brokers...)
	u.txid, u.claims = txid, r.claims
	next := open(t, u)
	if got := next.session.Generation(); got != before+1 {
		t.Fatalf("the next sink has generation %d, want %d", got, before+1)
	}
	r = next
	each(0, 12)
	r.acks.resolved(36)
	inOrder(t, read(t, brokers, "a"), 3, 12)
}

// A cluster whose answers are late is one that works: the last broker that there is to ask has the time that it takes.
func TestMetadataOfASlowClusterIsWaitedFor(t *testing.T) {
	t.Parallel()
	kc, brokers := fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "a"), kfake.SleepOutOfOrder())
	c, err := NewClient(Config{Brokers: brokers})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	kc.ControlKey(int16(kmsg.Metadata), func(kmsg.Request) (kmsg.Response, error, bool) {
		kc.KeepControl()
		kc.SleepControl(func() {
			select {
			case <-time.After(metaTimeout + connectSlack + time.Second):
			case <-t.Context().Done():
			}
		})
		return nil, nil, false
	})
	l, err := c.Metadata(t.Context(), []string{"a"})
	if err != nil || len(l.Topics["a"].Partitions) != 1 {
		t.Errorf("%+v, %v", l, err)
	}
}
