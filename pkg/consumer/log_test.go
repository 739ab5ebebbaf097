package consumer_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// changing is a transport of one partition, whose log a test may change under the consumer.
type changing struct {
	mu          sync.Mutex
	records     []transport.Record
	start       int64
	end         int64
	committed   int64
	committedID string
	life        string // of the topic; part of each id
	id          string // of the topic; "" for a transport that does not return ids
	ignoresIDs  bool   // a fetch does not compare the id, like one of a broker before Kafka 3.1
	lives       int    // how often the topic was created again
	served      bool   // the records of this life were fetched
	noLog       error  // of each call of Log
	epoch       int32  // of the leader
	diverged    int64  // where other records replaced lost ones, until a fetch has reported it; 0 for none
}

// DescribeGroup describes a group that this member has alone.
func (l *changing) DescribeGroup(context.Context, string) (transport.GroupState, error) {
	return transport.GroupState{}, nil
}

// replaceFrom replaces the records from end on by n records of a new life, before any fetch can see that they are gone.
func (l *changing) replaceFrom(end int64, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = slices.DeleteFunc(l.records, func(r transport.Record) bool { return r.Offset >= end })
	l.end, l.diverged, l.life = end, end, "after the election "
	l.epoch++
	for range n {
		l.addLocked("a")
	}
}

// recreate replaces the topic by another one of the same name, which has an id if the topic has one.
func (l *changing) recreate(key string, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lives++
	l.records, l.start, l.end, l.life, l.epoch, l.served = nil, 0, 0, strings.Repeat("re", l.lives)+"created", 0, false
	if l.id != "" {
		l.id += " recreated"
	}
	for range n {
		l.addLocked(key)
	}
}

// recreateDuringAttempt starts c on a topic with 15 records, and replaces the topic by another one with two when an attempt has
// begun. It blocks until c has reported the gap and fetched the new records.
func (l *changing) recreateDuringAttempt(t *testing.T, c *consumer.Consumer, began, gaps <-chan struct{}) {
	t.Helper()
	for range 15 {
		l.append("a")
	}
	startConsumer(t, c)
	<-began
	l.recreate("a", 2)
	<-gaps
	stacktest.Eventually(t, "the new records", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.served
	})
}

func (l *changing) append(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addLocked(key)
}

// addLocked appends a record.
func (l *changing) addLocked(key string) {
	l.records = append(l.records, transport.Record{
		Topic: "log", Offset: l.end, LeaderEpoch: l.epoch, Key: []byte(key), Value: []byte("x"), Time: time.Unix(1, 0),
		Headers: []event.Header{{Key: "id", Value: fmt.Append(nil, l.life, l.end)}, {Key: "type", Value: []byte("counted")}},
	})
	l.end++
}

// cut removes the records from end on, as an unclean election of a leader does.
func (l *changing) cut(end int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end = end
	l.epoch++
	l.records = slices.DeleteFunc(l.records, func(r transport.Record) bool { return r.Offset >= end })
}

// compact removes records, and leaves holes.
func (l *changing) compact(offsets ...int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = slices.DeleteFunc(l.records, func(r transport.Record) bool { return slices.Contains(offsets, r.Offset) })
}

// retain removes the records below start.
func (l *changing) retain(start int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.start = start
	l.records = slices.DeleteFunc(l.records, func(r transport.Record) bool { return r.Offset < start })
}

func (l *changing) Join(ctx context.Context, _ string, _ []string, s transport.Session) error {
	return s.Serve(ctx, l)
}

func (*changing) Publish(context.Context, string, []transport.Record) error { return nil }

func (*changing) ID() int32 { return 1 }

func (l *changing) Partitions() []transport.TopicPartition {
	return []transport.TopicPartition{{Topic: "log"}}
}

func (l *changing) Resume(context.Context, transport.TopicPartition) (transport.Start, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return transport.Start{GroupOffset: transport.GroupOffset{Offset: max(l.committed, 0), TopicID: l.committedID}}, nil
}

func (*changing) Changes() <-chan transport.Change { return nil }

func (l *changing) Log(context.Context, transport.TopicPartition) (inbox.Log, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return inbox.Log{ID: l.id, End: l.end, Epoch: l.epoch}, l.noLog
}

func (l *changing) Fetch(ctx context.Context, tp transport.TopicPartition, from transport.FetchFrom, _ int) (transport.Fetched, error) {
	offset := from.Offset
	l.mu.Lock()
	defer l.mu.Unlock()
	if from.TopicID != "" && from.TopicID != l.id && !l.ignoresIDs {
		return transport.Fetched{}, errors.New("the id of the topic is unknown")
	}
	if offset < l.start || offset > l.end {
		return transport.Fetched{}, &transport.RangeError{TopicPartition: tp, Offset: offset, Start: l.start, End: l.end}
	}
	if end := l.diverged; end > 0 && offset > end {
		l.diverged = 0
		return transport.Fetched{}, &transport.RangeError{TopicPartition: tp, Offset: offset, Start: l.start, End: end, Diverged: true}
	}

	at, _ := slices.BinarySearchFunc(l.records, offset, func(r transport.Record, o int64) int { return cmp.Compare(r.Offset, o) })
	if at == len(l.records) && offset == l.end {
		life := l.lives
		l.mu.Unlock()
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
		l.mu.Lock()
		if l.lives != life {
			return transport.Fetched{}, errors.New("the topic was deleted")
		}
		return transport.Fetched{Next: offset, End: offset}, nil
	}

	l.served = l.served || len(l.records) > at
	return transport.Fetched{Records: slices.Clone(l.records[at:]), Next: l.end, End: l.end}, nil
}

func (l *changing) Commit(_ context.Context, offsets map[transport.TopicPartition]transport.GroupOffset) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, at := range offsets {
		l.committed, l.committedID = at.Offset, at.TopicID
	}
	return nil
}

func (l *changing) waitCommitted(t *testing.T, at int64) {
	t.Helper()
	stacktest.Eventually(t, fmt.Sprint("the offset ", at), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.committed == at
	})
}

// renewed is an inbox of which another process begins a generation just after it was attached to.
type renewed struct {
	mu       sync.Mutex
	attached int
	passed   int
}

func (*renewed) Remember(ctx context.Context) context.Context { return ctx }

func (*renewed) Admit(_ context.Context, list []inbox.Entry) ([]bool, error) {
	fresh := make([]bool, len(list))
	for i := range fresh {
		fresh[i] = true
	}
	return fresh, nil
}

func (x *renewed) AdmitNew(ctx context.Context, list []inbox.Entry) ([]bool, error) {
	return x.Admit(ctx, list)
}

func (x *renewed) Check(ctx context.Context, list []inbox.Entry) ([]bool, error) {
	return x.Admit(ctx, list)
}

func (x *renewed) Pass(context.Context, []inbox.Entry) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.attached < 2 {
		return inbox.ErrStale
	}
	x.passed++
	return nil
}

func (*renewed) Claim(context.Context, inbox.Entry, time.Duration) (*inbox.Claim, error) {
	return nil, errors.New("no message can be claimed")
}

func (x *renewed) Attach(context.Context, string, string, int32, inbox.Log) (inbox.Generation, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.attached++
	return inbox.Generation{}, nil
}

func (*renewed) Release(context.Context, ...inbox.Partition) error { return nil }

func (*renewed) Heartbeat(context.Context) error { return nil }

func (*renewed) TopicIDs(context.Context, []inbox.Partition) (map[inbox.Partition]string, error) {
	return nil, nil
}

func (*renewed) StoreTopicIDs(context.Context, map[inbox.Partition]string) error { return nil }

// newLogConsumer returns a consumer of a log, without servers. It drops all errors.
func newLogConsumer(t *testing.T, l *changing, opts ...consumer.Option) *consumer.Consumer {
	t.Helper()
	base := []consumer.Option{
		consumer.WithTransport(l), consumer.WithTopics("log"), consumer.WithCommitCount(1), consumer.WithInbox(&renewed{}),
		consumer.WithDisposer(newDisposed()), consumer.WithErrorHook(func(context.Context, error) {}),
		consumer.Transactions(func(ctx context.Context, fn func(context.Context) error) error { return fn(ctx) }),
	}
	c, err := consumer.New("group", nil, append(base, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A handler whose transaction is rolled back runs again. That is logged once for the handler, not for each message.
func TestARepeatedTransactionIsLoggedOnce(t *testing.T) {
	t.Parallel()
	l := &changing{}
	for range 3 {
		l.append("a")
	}
	rolledBack := errors.New("write conflict")
	var text stacktest.Buffer
	var mu sync.Mutex
	calls := 0
	c := newLogConsumer(t, l, consumer.WithSharedTransaction(1), consumer.WithLogger(slog.New(slog.NewTextHandler(&text, nil))),
		consumer.Transactions(func(ctx context.Context, fn func(context.Context) error) error {
			if err := fn(ctx); !errors.Is(err, rolledBack) {
				return err
			}
			return fn(ctx)
		}))
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error {
		mu.Lock()
		defer mu.Unlock()
		if calls++; calls%2 == 1 {
			return rolledBack
		}
		return nil
	})
	stop := startConsumer(t, c)
	l.waitCommitted(t, 3)
	stop()

	mu.Lock()
	defer mu.Unlock()
	if got := text.String(); calls != 6 || strings.Count(got, "handler runs again") != 1 || !strings.Contains(got, rolledBack.Error()) {
		t.Errorf("%d calls, log:\n%s", calls, got)
	}
}

func startConsumer(t *testing.T, c *consumer.Consumer) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// held has the numbers of messages in memory.
type held struct {
	telemetry.Discard

	mu       sync.Mutex
	messages int64
}

func (h *held) Measure(m telemetry.Measurement) {
	if m.Metric == telemetry.Held {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.messages = m.N
	}
}

// pauseAndDrop returns a consumer that is paused in its first message. It has dropped the second message of the key from
// memory, and it has handled two messages of another key.
func pauseAndDrop(t *testing.T) (l *changing, c *consumer.Consumer, goOn func(), handled func() map[int64]int) {
	t.Helper()
	l = &changing{}
	mem := &held{}
	var mu sync.Mutex
	times := map[int64]int{}
	began, release := make(chan struct{}), make(chan struct{})
	c = newLogConsumer(t, l, consumer.WithTelemetry(mem))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if m.Offset == 0 {
			close(began)
			select {
			case <-release:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		mu.Lock()
		defer mu.Unlock()
		times[m.Offset]++
		return nil
	}, consumer.WithMode(consumer.AtLeastOnce))
	handled = func() map[int64]int {
		mu.Lock()
		defer mu.Unlock()
		return map[int64]int{0: times[0], 1: times[1], 2: times[2], 3: times[3]}
	}

	other := "b"
	for inbox.Lane([]byte(other), 0) == inbox.Lane([]byte("a"), 0) {
		other += "b"
	}
	for _, key := range []string{"a", "a", other, other} {
		l.append(key)
	}
	startConsumer(t, c)
	<-began
	stacktest.Eventually(t, "the other key", func() bool { return handled()[3] == 1 })
	c.Pause()
	stacktest.Eventually(t, "the held messages are dropped", func() bool {
		mem.mu.Lock()
		defer mem.mu.Unlock()
		return mem.messages == 1
	})
	return l, c, func() { c.Resume(); close(release) }, handled
}

// N29: a record that compaction removed while it was not in memory is a hole like any other.
func TestN29_CompactedRecordsArePassed(t *testing.T) {
	t.Parallel()
	checkPassed(t, func(l *changing) { l.compact(1) })
}

// N29: if retention passes an unfinished message, the topic is not considered recreated.
func TestN29_ExpiredRecordsArePassed(t *testing.T) {
	t.Parallel()
	checkPassed(t, func(l *changing) { l.retain(2) })
}

// checkPassed removes the second record while it is not in memory, and checks that all others are handled and the offsets continue.
func checkPassed(t *testing.T, remove func(*changing)) {
	t.Helper()
	l, _, goOn, handled := pauseAndDrop(t)
	remove(l)
	goOn()
	l.waitCommitted(t, 4)
	if got := handled(); got[0] != 1 || got[1] != 0 || got[2] != 1 || got[3] != 1 {
		t.Errorf("the records were handled %v times, want each once except the removed one", got)
	}
}

// A partition whose end cannot be read from Kafka waits alone. It is no outage of the database, in which no partition is read.
func TestAPartitionWithoutALeaderIsNoOutageOfTheDatabase(t *testing.T) {
	t.Parallel()
	l := &changing{noLog: errors.New("no leader")}
	reported, outage := make(chan struct{}, 1000), atomic.Bool{}
	c := newLogConsumer(t, l, consumer.WithErrorHook(func(_ context.Context, err error) {
		if _, ok := errors.AsType[*consumer.OutageError](err); ok {
			outage.Store(true)
		}
		reported <- struct{}{}
	}))
	addHandler(t, c, "counted", nop)
	l.append("a")
	startConsumer(t, c)
	<-reported

	l.mu.Lock()
	l.noLog = nil
	l.mu.Unlock()
	l.waitCommitted(t, 1)
	if outage.Load() {
		t.Error("an outage of the database was reported")
	}
}

// A generation that begins while a message goes to the dead letters is attached to, as it is while one is handled.
func TestALetterPassesAGenerationThatBegan(t *testing.T) {
	t.Parallel()
	l, x := &changing{}, &renewed{}
	c := newLogConsumer(t, l, consumer.WithInbox(x))
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error { return errWanted }, withTries(1))
	l.append("a")
	startConsumer(t, c)
	l.waitCommitted(t, 1)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.attached != 2 || x.passed != 1 {
		t.Errorf("attached %d times, passed %d", x.attached, x.passed)
	}
}

// N29: messages of a deleted topic do not move the watermarks of the new topic.
func TestN29_MessagesOfADeletedTopicDoNotCount(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	x, err := mongostore.Open(db, inbox.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	l := &changing{}
	var mu sync.Mutex
	old, fresh := 0, 0
	began, release := make(chan struct{}), make(chan struct{})
	begin := sync.OnceFunc(func() { close(began) })
	gaps := make(chan struct{}, 10)
	c := newLogConsumer(t, l, consumer.WithInbox(x), consumer.WithSharedTransaction(1), consumer.WithErrorHook(func(_ context.Context, err error) {
		var gap *transport.RangeError
		if errors.As(err, &gap) {
			gaps <- struct{}{}
		}
	}), consumer.Transactions(func(ctx context.Context, fn func(context.Context) error) error {
		return transaction.Run(ctx, db.Client(), fn)
	}))

	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if m.Offset == 10 {
			begin()
			select {
			case <-release:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if strings.HasPrefix(m.ID, "recreated") {
			fresh++
		} else {
			old++
		}
		return nil
	})

	l.recreateDuringAttempt(t, c, began, gaps)
	close(release)
	l.waitCommitted(t, 2)
	mu.Lock()
	defer mu.Unlock()
	if fresh != 2 || old != 11 {
		t.Errorf("%d of the new topic's 2 records were handled, and %d of the old one's", fresh, old)
	}
}

// inDatabase is a consumer of a log whose inbox and messages that are set aside are in db.
func inDatabase(t *testing.T, l *changing, db *mongo.Database, opts ...consumer.Option) *consumer.Consumer {
	t.Helper()
	base := []consumer.Option{
		consumer.WithTransport(l), consumer.WithTopics("log"), consumer.WithCommitCount(1), consumer.WithDisposer(newDisposed()),
		consumer.WithErrorHook(func(context.Context, error) {}),
	}
	c, err := consumer.New("group", db, append(base, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// N29: a message of a deleted topic that fails is set aside, and does not move the watermark of the new topic.
func TestN29_AFailedMessageOfADeletedTopicHidesNoNewOne(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	l := &changing{}
	var mu sync.Mutex
	handled := map[string]int{}
	began, release := make(chan struct{}), make(chan struct{})
	begin := sync.OnceFunc(func() { close(began) })
	gaps := make(chan struct{}, 10)
	c := inDatabase(t, l, db, consumer.WithRetry(soon), consumer.WithErrorHook(func(_ context.Context, err error) {
		if errors.Is(err, transport.ErrGap) {
			gaps <- struct{}{}
		}
	}))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if m.ID == "10" && m.Attempt == 1 {
			begin()
			select {
			case <-release:
				return errWanted
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		mu.Lock()
		defer mu.Unlock()
		handled[m.ID]++
		return nil
	})

	l.recreateDuringAttempt(t, c, began, gaps)
	close(release)
	// The new messages of the key follow the failed message.
	stacktest.Eventually(t, "the message that failed, and both of the new topic", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return handled["10"] > 0 && handled["recreated0"] > 0 && handled["recreated1"] > 0
	}, func() any { mu.Lock(); defer mu.Unlock(); return fmt.Sprint(handled) })
	l.waitCommitted(t, 2)
}

// N29: a topic that is deleted, created and filled past the offset between two fetches is read from its start.
func TestN29_ATopicThatIsRefilledAtOnceIsReadFromItsStart(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	l := &changing{id: "cluster/topic"}
	var mu sync.Mutex
	handled := map[string]int{}
	c := inDatabase(t, l, db)
	addHandler(t, c, "counted", func(_ context.Context, m *consumer.Message) error {
		mu.Lock()
		defer mu.Unlock()
		handled[m.ID]++
		return nil
	})

	for range 3 {
		l.append("a")
	}
	startConsumer(t, c)
	l.waitCommitted(t, 3)
	l.recreate("a", 5)
	l.waitCommitted(t, 5)

	mu.Lock()
	defer mu.Unlock()
	for i := range 5 {
		if id := fmt.Sprint("recreated", i); handled[id] != 1 {
			t.Errorf("%s was handled %d times, want once", id, handled[id])
		}
	}
}

// N29: after a restart, a message follows the message of its key that is set aside, also if the topic was created again before.
func TestN29_AMessageFollowsItsKeyInALaterGeneration(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	l := &changing{id: "cluster/topic"}
	var mu sync.Mutex
	var handled []string
	broken := true
	handledAll := func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(handled)
	}
	runUntil := func(offset int64) (stop func()) {
		c := inDatabase(t, l, db, consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}, Min: time.Hour, Max: time.Hour}))
		addHandler(t, c, "counted", func(_ context.Context, m *consumer.Message) error {
			mu.Lock()
			defer mu.Unlock()
			if m.ID == "recreated0" && broken {
				return errWanted
			}
			handled = append(handled, m.ID)
			return nil
		})
		stop = startConsumer(t, c)
		l.waitCommitted(t, offset)
		return stop
	}

	l.append("a")
	runUntil(1)()
	l.recreate("a", 1)
	l.mu.Lock()
	l.committed = 0
	l.mu.Unlock()
	runUntil(1)()
	// The first message of this member is one that follows.
	l.append("a")
	runUntil(2)()

	mu.Lock()
	broken = false
	mu.Unlock()
	dueNow := mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "due", Value: "$$NOW"}}}}}
	failed := bson.D{{Key: "due", Value: bson.D{{Key: "$exists", Value: true}}}}
	if res, err := db.Collection(setaside.DefaultCollection).UpdateMany(t.Context(), failed, dueNow); err != nil || res.ModifiedCount != 1 {
		t.Fatalf("messages that failed: %+v, %v", res, err)
	}
	runUntil(2)
	stacktest.Eventually(t, "all messages", func() bool { return len(handledAll()) == 3 })
	if got, want := handledAll(), []string{"0", "recreated0", "recreated1"}; !slices.Equal(got, want) {
		t.Errorf("handled %v, want %v", got, want)
	}
}

// N29: a topic that lost its last record is not read from its start, and the record that comes in its place is handled, also
// if the topic has grown past the old end before anybody could see that the record was gone.
func TestN29_ATruncatedTopicGoesOnFromItsEnd(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode  consumer.Mode
		grown int
	}{"none": {consumer.AtLeastOnce, 0}, "optimistic": {consumer.Transactional, 0}, "none, grown": {consumer.AtLeastOnce, 3}, "optimistic, grown": {consumer.Transactional, 3}} {
		t.Run(name, func(t *testing.T) {
			mode, grown := c.mode, c.grown
			t.Parallel()
			db := stacktest.Database(t, stacktest.Client(t))
			x, err := mongostore.Open(db, inbox.Settings{})
			if err != nil {
				t.Fatal(err)
			}

			l := &changing{id: "cluster/topic"}
			var mu sync.Mutex
			handled := map[string]int{}
			gaps := make(chan struct{}, 100)

			c := newLogConsumer(t, l, consumer.WithInbox(x), consumer.WithErrorHook(func(_ context.Context, err error) {
				if _, ok := errors.AsType[*transport.RangeError](err); ok {
					gaps <- struct{}{}
				}
			}), consumer.Transactions(func(ctx context.Context, fn func(context.Context) error) error {
				return transaction.Run(ctx, db.Client(), fn)
			}))

			addHandler(t, c, "counted", func(_ context.Context, m *consumer.Message) error {
				mu.Lock()
				defer mu.Unlock()
				handled[m.ID]++
				return nil
			}, consumer.WithMode(mode))

			for range 10 {
				l.append("a")
			}
			startConsumer(t, c)
			l.waitCommitted(t, 10)

			if grown > 0 {
				l.replaceFrom(9, grown)
				<-gaps
			} else {
				l.cut(9)
				<-gaps
				l.waitCommitted(t, 9)
				l.mu.Lock()
				l.life = "after the election "
				l.mu.Unlock()
				l.append("a")
			}

			l.waitCommitted(t, 9+int64(max(grown, 1)))
			mu.Lock()
			defer mu.Unlock()
			if len(handled) != 10+max(grown, 1) {
				t.Errorf("%d messages were handled", len(handled))
			}

			for id, n := range handled {
				if n != 1 {
					t.Errorf("%s was handled %d times", id, n)
				}
			}
		})
	}
}

func TestPanicsAroundAHandlerAreItsErrors(t *testing.T) {
	t.Parallel()
	l, gone := &changing{}, newDisposed()
	var panicked atomic.Bool
	c := newLogConsumer(t, l, consumer.WithDisposer(gone), consumer.WithInbox(&renewed{attached: 1}),
		consumer.Transactions(func(ctx context.Context, fn func(context.Context) error) error {
			if panicked.CompareAndSwap(false, true) {
				panic("wanted")
			}
			return fn(ctx)
		}))
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error { return nil }, withTries(1))
	l.append("a")
	startConsumer(t, c)
	l.waitCommitted(t, 1)
	var p *consumer.PanicError
	if all := gone.listAll(); len(all) != 1 || !errors.As(all[0].cause, &p) || p.Value != "wanted" {
		t.Errorf("%+v", all)
	}
}

// panicking panics at the end of each span.
type panicking struct{ telemetry.Discard }

func (panicking) Start(ctx context.Context, _ telemetry.Attempt) (context.Context, func(error)) {
	return ctx, func(error) { panic("wanted") }
}

// A commit remains a commit if its trace fails.
func TestAPanicAtTheEndOfATraceIsReported(t *testing.T) {
	t.Parallel()
	l, gone, reported := &changing{}, newDisposed(), make(chan error, 10)
	c := newLogConsumer(t, l, consumer.WithDisposer(gone), consumer.WithErrorHook(func(_ context.Context, err error) { reported <- err }),
		consumer.WithTelemetry(panicking{}))
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error { return nil }, withTries(1))
	l.append("a")
	startConsumer(t, c)
	l.waitCommitted(t, 1)
	var p *consumer.PanicError
	if err := <-reported; !errors.As(err, &p) || len(gone.listAll()) != 0 {
		t.Errorf("%v, %d letters", err, len(gone.listAll()))
	}
}

// The options of the inbox reach it: the markers are in the named collection with the retention, and a topic that was
// deleted and created again ends the run.
func TestN29_ARecreatedTopicHaltsTheRun(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	l := &changing{id: "cluster/topic"}
	member := func(opts ...consumer.Option) *consumer.Consumer {
		t.Helper()
		c, err := consumer.New("group", db, append(opts, consumer.WithTransport(l), consumer.WithTopics("log"),
			consumer.WithCollections("marks"), consumer.WithRetention(time.Hour), consumer.WithoutTTL(), consumer.WithLease(time.Second),
			consumer.WithCommitCount(1), consumer.WithDisposer(newDisposed()), consumer.WithErrorHook(func(context.Context, error) {}))...)
		if err != nil {
			t.Fatal(err)
		}
		addHandler(t, c, "counted", nop, consumer.WithMode(consumer.Claimed))
		return c
	}

	for range 3 {
		l.append("a")
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- member(consumer.WithHaltOnLoss()).Run(ctx) }()
	l.waitCommitted(t, 3)
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}

	kept := bson.D{{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{bson.D{{Key: "$subtract", Value: bson.A{"$k", "$at"}}}, time.Hour.Milliseconds()}}}}}
	if n, err := db.Collection("marks").CountDocuments(t.Context(), kept); n != 3 || err != nil {
		t.Errorf("%d markers with the retention, %v", n, err)
	}

	l.mu.Lock()
	l.committed = 0
	l.mu.Unlock()
	l.recreate("a", 2)
	if err := member(consumer.WithHaltOnLoss()).Run(t.Context()); !errors.Is(err, consumer.ErrGap) {
		t.Fatalf("the run ends with %v", err)
	}

	// Without the option the consumer handles the new topic.
	startConsumer(t, member())
	l.waitCommitted(t, 2)

	if _, err := consumer.New("group", db, consumer.WithTopics("log"), consumer.WithTransport(l), consumer.WithRetention(time.Second),
		consumer.WithLease(time.Millisecond), consumer.WithCollections("a$b")); err == nil ||
		!strings.Contains(err.Error(), "retention 1s") || !strings.Contains(err.Error(), "lease 1ms") || !strings.Contains(err.Error(), "a$b") {
		t.Errorf("invalid options: %v", err)
	}
}
