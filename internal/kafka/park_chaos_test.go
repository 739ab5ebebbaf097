package kafka

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/record"
)

// TestN11_ParkingChaos parks partitions again and again, with heads whose fate is unknown, while leaders move, answers are
// lost, connections are cut and one sink follows the other; what is given back is released all the time. Nothing is lost, nothing
// stands twice, each key is in order, and each answer names the place where the record stands.
func TestN11_ParkingChaos(t *testing.T) {
	t.Parallel()
	const keys, least, partitions = 40, 80, 8
	var on, forbidden atomic.Bool
	timeout := 250 * time.Millisecond
	kc, brokers := fake(t, kfake.NumBrokers(3), kfake.SeedTopics(partitions, "a"), kfake.SleepOutOfOrder())
	for _, e := range []*kerr.Error{kerr.RequestTimedOut, kerr.NotEnoughReplicasAfterAppend, kerr.NotEnoughReplicas} {
		kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: e, Count: -1, When: func(kmsg.Request) bool { return on.Load() && rand.IntN(100) < 5 }})
	}
	sickly := []int32{0, 1, 2, 3}
	kc.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Partitions: sickly, Err: kerr.TopicAuthorizationFailed, Count: -1, When: func(kmsg.Request) bool { return forbidden.Load() }})
	d := sit(t, setUp{cfg: Config{Brokers: brokers, RequestTimeout: timeout, MaxBatchBytes: 1000, Dial: flakyDial(&on), ParkAfter: 5 * time.Millisecond}, every: 300 * time.Millisecond})
	on.Store(true)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	every := func(d time.Duration, f func(i int)) {
		wg.Go(func() {
			tick := time.NewTicker(d)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-tick.C:
					f(i)
				}
			}
		})
	}
	every(60*time.Millisecond, func(int) { _ = kc.MoveTopicPartition("a", rand.Int32N(partitions), rand.Int32N(3)) })
	every(150*time.Millisecond, func(i int) { forbidden.Store(i%2 == 0) })
	ends := 0
	next := func() {
		select {
		case err := <-d.r.ended:
			if !errors.Is(err, ErrReopen) && !errors.Is(err, ErrBroken) {
				t.Fatal(err)
			}
			ends++
			d.follow()
		default:
		}
	}
	pace := time.NewTicker(30 * time.Millisecond)
	defer pace.Stop()
	seen := func() bool { // what this is about: some were parked, and a sink has ended for a batch that may stand
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.calls) > 0 && ends > 1
	}
	each := 0
	for i := 0; i < least || i < 10*least && !seen(); i, each = i+1, i+1 {
		for k := range keys {
			_, _ = d.send(rec("a", fmt.Sprint("key", k), fmt.Sprintf("key%d/%d", k, i)))
		}
		d.r.Flush()
		if i%2 == 1 {
			d.try()
		}
		next()
		<-pace.C
	}
	on.Store(false)
	close(stop)
	wg.Wait()
	forbidden.Store(false)
	until(t, "all of it is answered", func() bool {
		next()
		if d.count() > 0 {
			d.try()
		}
		d.r.acks.mu.Lock()
		defer d.r.acks.mu.Unlock()
		return len(d.r.acks.acked) == keys*each
	})
	d.answered(keys * each)
	log := read(t, brokers, "a")
	inOrder(t, log, keys, each)
	stands := map[place]string{}
	for _, list := range log {
		for _, g := range list {
			stands[place{record.TopicPartition{Topic: "a", Partition: g.Partition}, g.Offset}] = string(g.Value)
		}
	}
	side := 0
	for k, at := range d.r.acks.acked {
		if k.IsSide() {
			side++
		}
		i := int(k &^ record.Side)
		if want := fmt.Sprintf("key%d/%d", i%keys, i/keys); stands[at] != want {
			t.Fatalf("event %d was acked at %v, where %q stands instead of %q", i, at, stands[at], want)
		}
	}
	if side == 0 || ends == 0 {
		t.Error("nothing was parked, or no sink has ended")
	}
	t.Logf("%d of %d by the side, given back in %d calls; %d sinks", side, keys*each, len(d.calls), ends+1)
}
