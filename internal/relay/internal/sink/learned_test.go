package sink

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// The relay reads its own batches again to divide them, to reject a record or to give records back. The limits for records
// of others do not apply to them.
func TestOwnRecordsOfAnySizeAreReadAgain(t *testing.T) {
	t.Parallel()
	rec := func(topic string) record.Record {
		r := newRecord(topic, "k", "many")
		for range 70_000 {
			r.Headers = append(r.Headers, record.Header{Key: []byte("h")})
		}
		return r
	}

	t.Run("too large for the topic", func(t *testing.T) {
		t.Parallel()
		topic := stacktest.Name(t)
		stacktest.CreateTopic(t, topic, 1, kafka.ConfigEntry{ConfigName: "max.message.bytes", ConfigValue: "100000"})
		r := openSink(t, sinkOptions{})
		r.send(t, rec(topic))
		r.send(t, newRecord(topic, "k", "next"))
		r.Flush()
		r.acks.waitResolved(2)
		if got := r.acks.rejected[0]; got == nil || got.Class != record.MessageTooLarge {
			t.Errorf("the large record: %+v", got)
		}
	})

	t.Run("missing topic", func(t *testing.T) {
		t.Parallel()
		d := openWithHolder(t, sinkOptions{cfg: testConfig{ParkAfter: 100 * time.Millisecond}})
		if _, err := d.send(rec(stacktest.Name(t) + ".missing")); err != nil {
			t.Fatal(err)
		}
		d.r.Flush()
		stacktest.Eventually(t, "the record is given back", func() bool {
			select {
			case err := <-d.r.ended:
				t.Fatalf("the sink has ended: %v", err)
			default:
			}
			return d.heldCount() == 1
		})
	})
}

// closingConn ends a connection at a request above a size, as a broker does whose socket.request.max.bytes is lower. It may
// take the request first.
type closingConn struct {
	net.Conn
	most   int
	whole  bool
	left   int
	closed bool
	count  *atomic.Int32
}

func (c *closingConn) Write(p []byte) (int, error) {
	if c.left == 0 && len(p) >= 4 {
		c.left = int(binary.BigEndian.Uint32(p)) + 4
		if c.left-4 > c.most {
			c.closed = true
			c.count.Add(1)
			_ = c.Conn.Close()
		}
	}
	if c.closed && !c.whole {
		return 0, syscall.ECONNRESET
	}
	c.left = max(c.left-len(p), 0)
	if c.closed {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *closingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.closed {
		return 0, io.EOF
	}
	return n, err
}

// A broker that closes the connection at the same request again and again has a lower limit. Smaller batches are sent, and a
// record that is too large alone is rejected.
func TestConnectionThatEndsAtLargeRequests(t *testing.T) {
	t.Parallel()
	const most = 200 << 10
	for _, whole := range []bool{false, true} {
		t.Run(fmt.Sprintf("whole %t", whole), func(t *testing.T) {
			t.Parallel()
			topic := stacktest.Topic(t, 1)
			var closings atomic.Int32
			dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
				if err != nil {
					return nil, err
				}
				return &closingConn{Conn: c, most: most, whole: whole, count: &closings}, nil
			}

			acks, opener := newLedger(t), newOpener(t, testConfig{Dial: dial})
			opener.limits.reopenEvery = time.Millisecond
			stored := &claims{}
			var list []record.Record
			large := newRecord(topic, "a", "large")
			large.Value = append(large.Value, bytes.Repeat([]byte("x"), 2*most)...)
			list = append(list, large)
			for i := range 40 {
				r := newRecord(topic, "b", fmt.Sprintf("small/%d", i))
				r.Value = append(r.Value, bytes.Repeat([]byte("x"), 10_000)...)
				list = append(list, r)
			}

			// Each sink sends all unresolved records, as after a takeover.
			for sinks := 0; ; sinks++ {
				if sinks == 10 {
					t.Fatal("ten sinks have not sent the records")
				}
				senders, offsets := stored.readDocument()
				ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
				to := TakeOver{Holder: acks, Fence: fence.In{TransactionalID: "outrelay.test." + topic, Senders: senders, Offsets: offsets, Gate: func() bool { return true }}}
				s, err := opener.Open(ctx, to, stored, acks)
				cancel()
				if err != nil {
					t.Fatal(err)
				}
				run, stop := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- s.Run(run) }()
				for i := range list {
					acks.mu.Lock()
					_, acked := acks.acked[record.Ticket(i)]
					_, rejected := acks.rejected[record.Ticket(i)]
					acks.mu.Unlock()
					if acked || rejected {
						continue
					}
					if err := s.Send(&list[i], record.Ticket(i)); err != nil && !errors.Is(err, ErrReopen) {
						t.Fatal(err)
					}
				}
				s.Flush()

				done := make(chan struct{})
				go func() {
					defer close(done)
					for run.Err() == nil {
						acks.mu.Lock()
						n, changed := len(acks.acked)+len(acks.rejected), acks.changed
						acks.mu.Unlock()
						if n == len(list) {
							return
						}
						select {
						case <-changed:
						case <-run.Done():
						}
					}
				}()
				var failed error
				select {
				case failed = <-ended:
				case <-done:
				case <-time.After(testTimeout):
					stop()
					t.Fatalf("the records were not resolved: %d of %d are acked, state %+v", len(acks.acked), len(list), s.State())
				}
				stop()
				<-done
				if failed == nil {
					<-ended
					break
				}
				if !errors.Is(failed, ErrReopen) {
					t.Fatal(failed)
				}
			}

			got := acks.rejected[0]
			if got == nil || got.Class != record.MessageTooLarge || !strings.Contains(got.Reason, "socket.request.max.bytes") {
				t.Errorf("the large record: %+v", got)
			}
			if n := len(acks.acked); n != 40 {
				t.Errorf("%d small records were acked", n)
			}
			if all := readTopic(t, stacktest.Brokers(t), topic); len(all[0]) != 40 {
				t.Errorf("the topic has %d records", len(all[0]))
			}
			t.Logf("%d connections were closed", closings.Load())
		})
	}
}

// A limit that one broker shows does not count for the others.
func TestConnectionsOfOneBrokerThatEnd(t *testing.T) {
	t.Parallel()
	kc, brokers := newFakeCluster(t, kfake.NumBrokers(2), kfake.SeedTopics(2, "a"))
	for partition := range int32(2) {
		if err := kc.MoveTopicPartition("a", partition, partition); err != nil {
			t.Fatal(err)
		}
	}
	layout, err := newClient(t, testConfig{Brokers: brokers}).Metadata(t.Context(), []string{"a"})
	if err != nil {
		t.Fatal(err)
	}
	closes := layout.LeaderAddr(record.TopicPartition{Topic: "a", Partition: 0})

	var closings atomic.Int32
	u := fakeOptions(brokers...)
	u.cfg.Compression = "none"
	u.cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil || addr != closes {
			return conn, err
		}
		return &closingConn{Conn: conn, most: 100 << 10, count: &closings}, nil
	}
	r := openSink(t, u)
	for partition := range int32(2) {
		large := newRecord("a", "k", fmt.Sprint("large/", partition))
		large.Partition = partition
		large.Value = append(large.Value, bytes.Repeat([]byte("x"), 200<<10)...)
		r.send(t, large)
		r.Flush()
		r.acks.waitResolved(int(partition) + 1)
	}
	if got := r.acks.rejected[0]; got == nil || got.Class != record.MessageTooLarge {
		t.Errorf("the record for the broker that closes connections: %+v", got)
	}
	if got := r.acks.rejected[1]; got != nil {
		t.Errorf("the record for the other broker is rejected: %s", got.Reason)
	}
}

// A connection that ends at a small request shows an outage. The size of requests stays, and a large record is not at fault for a while.
func TestConnectionThatEndsAtASmallRequest(t *testing.T) {
	t.Parallel()
	r := openSink(t, sinkOptions{noRun: true})
	r.mu.Lock()
	defer r.mu.Unlock()
	topic := r.newTopic("a")
	topic.addPartitions(2)
	fail := func(size, count int) (*loop, string) {
		l := &loop{sink: r.Sink, wrote: true}
		for _, p := range topic.partitions[:count] {
			rec := newRecord("a", "k", "k")
			rec.Value = make([]byte, size)
			b := r.batches.newBatchLocked()
			r.batches.appendRecordLocked(b, &rec, 0, size)
			b.closedCount = closedTries
			l.request = append(l.request, flight{p, b})
		}
		return l, l.adaptToFailureLocked(fmt.Errorf("%w: %w", kafkawire.ErrIncomplete, io.ErrUnexpectedEOF), time.Now())
	}

	if _, why := fail(2*leastClosed, 1); why == "" {
		t.Error("a large request that ends the connection again and again is not noticed")
	}
	if l, _ := fail(leastClosed, 2); l.smaller < leastClosed {
		t.Errorf("after a large request, the next ones have at most %d bytes", l.smaller)
	}
	closes := func() bool {
		return r.c.learned.closes((&loop{sink: r.Sink}).brokerAddr(), 3*leastClosed, time.Now())
	}
	if !closes() {
		t.Error("the limit of the broker is not remembered")
	}
	if l, why := fail(1000, 2); l.smaller != 0 || why != "" {
		t.Errorf("after a small request, the next ones have at most %d bytes, because %q", l.smaller, why)
	}
	if closes() {
		t.Error("the broker closes connections at small requests, too, but large records are rejected")
	}
	if _, why := fail(2*leastClosed, 1); why != "" {
		t.Errorf("the broker closes connections at small requests, too, but the size counts: %s", why)
	}
}

// throttle dials through a proxy that passes bytesPerSecond on to the broker. With buffer, the proxy takes everything at
// once, so that the sender does not see its progress.
func throttle(t *testing.T, bytesPerSecond int, buffer bool) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		broker, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		client, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
		if err != nil {
			return nil, err
		}
		proxy, err := l.Accept()
		if err != nil {
			return nil, err
		}
		if !buffer {
			_ = proxy.(*net.TCPConn).SetReadBuffer(32 << 10)
		}

		stop := context.AfterFunc(t.Context(), func() { _ = broker.Close(); _ = proxy.Close() })
		go func() {
			defer stop()
			_, _ = io.Copy(proxy, broker)
			_ = proxy.Close()
		}()
		taken := make(chan []byte, 1<<12)
		go func() {
			defer close(taken)
			for {
				p := make([]byte, 16<<10)
				n, err := proxy.Read(p)
				if n > 0 && buffer {
					taken <- p[:n]
				} else if n > 0 {
					<-time.After(time.Duration(n) * time.Second / time.Duration(bytesPerSecond))
					_, _ = broker.Write(p[:n])
				}
				if err != nil {
					return
				}
			}
		}()
		go func() {
			for p := range taken {
				<-time.After(time.Duration(len(p)) * time.Second / time.Duration(bytesPerSecond))
				_, _ = broker.Write(p)
			}
			_ = broker.Close()
		}()
		return client, nil
	}
}

// On a slow link, a request takes longer than its time limit. It arrives nevertheless, and is not sent again and again.
func TestSlowLinkDelivers(t *testing.T) {
	t.Parallel()
	const records, size = 608, 8 << 10
	for _, buffer := range []bool{false, true} {
		t.Run(fmt.Sprintf("buffer %t", buffer), func(t *testing.T) {
			t.Parallel()
			topic := stacktest.Topic(t, 4)
			// Four batches of 1 MiB in a request take four times the limit.
			u := sinkOptions{cfg: testConfig{Dial: throttle(t, 600<<10, buffer), RequestTimeout: time.Second}}
			if buffer {
				u.cfg.MaxBatchBytes = 256 << 10
			}
			r := openSink(t, u)
			random := rand.NewChaCha8([32]byte{1})
			for i := range records {
				rec := newRecord(topic, fmt.Sprint("k", i%16), fmt.Sprintf("k%d/%d", i%16, i/16))
				pad := make([]byte, size)
				_, _ = random.Read(pad)
				rec.Headers = append(rec.Headers, record.Header{Key: []byte("pad"), Value: pad})
				r.send(t, rec)
			}
			r.Flush()
			r.acks.waitResolved(records)
			requireInOrder(t, readTopic(t, stacktest.Brokers(t), topic), 16, (records+15)/16)
		})
	}
}
