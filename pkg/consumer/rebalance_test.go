package consumer_test

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// movingGroup is a group of franz that has just been rebalanced: the member stays had all partitions, and has given half of them
// to the member comes, which has handled no message of them yet.
type movingGroup struct {
	*kit
	stays, comes *consumer.Consumer
	keysStay     []string // a key of each partition that has stayed
	keysComes    []string // a key of each partition that has moved
	runs         atomic.Int32
	started      chan struct{}
}

// newMovingGroup starts both members. Their handler inserts a document for each message, and then calls work for each message
// with the value "long".
func newMovingGroup(t *testing.T, partitions int, work func(ctx context.Context, k *kit) error, opts ...consumer.Option) *movingGroup {
	t.Helper()
	k := newKit(t, partitions)
	k.newCollection("effects")
	if _, err := k.newCollection("one").InsertOne(k.context(), bson.D{{Key: "x", Value: 1}}); err != nil {
		t.Fatal(err)
	}
	other := *k
	// Another process has other sessions.
	other.db = stacktest.Client(t).Database(k.db.Name())

	g := &movingGroup{kit: k, started: make(chan struct{}, 10*partitions)}
	var mu sync.Mutex
	partitionOf := map[string]int32{}
	handle := func(k *kit) consumer.HandlerFunc {
		insert := k.insertInto("effects")
		return func(ctx context.Context, m *consumer.Message) error {
			mu.Lock()
			partitionOf[string(m.Key)] = m.Partition
			mu.Unlock()
			if err := insert(ctx, m); err != nil {
				return err
			}
			if string(m.Value) != "long" {
				return nil
			}
			g.runs.Add(1)
			g.started <- struct{}{}
			return work(ctx, k)
		}
	}
	opts = append(opts, franz.Use(), consumer.WithSharedTransaction(1), consumer.WithConcurrency(partitions))
	g.stays, g.comes = k.newConsumer(opts...), other.newConsumer(opts...)
	addHandler(t, g.stays, "counted", handle(k))
	addHandler(t, g.comes, "counted", handle(&other))

	var ms []*consumer.Message
	for i := range 10 * partitions {
		ms = append(ms, newMessage(fmt.Sprintf("key%03d", i), "counted", "0"))
	}
	k.publish(ms...)
	k.start(g.stays)
	k.waitCount("effects", len(ms))
	k.start(g.comes)
	k.waitUntil("both members to have half of the partitions", func(context.Context) bool {
		return len(g.stays.Status().Partitions) == partitions/2 && len(g.comes.Status().Partitions) == partitions/2
	})

	stays := map[int32]bool{}
	for _, p := range g.stays.Status().Partitions {
		stays[p.Partition] = true
	}
	mu.Lock()
	defer mu.Unlock()
	seen := map[int32]bool{}
	for key, p := range partitionOf {
		switch {
		case seen[p]:
		case stays[p]:
			g.keysStay = append(g.keysStay, key)
		default:
			g.keysComes = append(g.keysComes, key)
		}
		seen[p] = true
	}
	if len(g.keysStay) != partitions/2 || len(g.keysComes) != partitions/2 {
		t.Fatalf("%v, %v", g.keysStay, g.keysComes)
	}
	return g
}

// startLong begins a long message in each of the first n partitions that have stayed.
func (g *movingGroup) startLong(n int) {
	g.Helper()
	for _, key := range g.keysStay[:n] {
		g.publish(newMessage(key, "counted", "long"))
	}
	for range n {
		g.waitFor("a long message", g.started)
	}
}

// attachMoved lets the new owner handle its first message of each partition that has moved.
func (g *movingGroup) attachMoved() {
	g.Helper()
	for _, key := range g.keysComes {
		g.publish(newMessage(key, "counted", "first of the new owner"))
	}
	g.waitUntil("the first messages of the new owner", func(ctx context.Context) bool {
		n, err := g.db.Collection("effects").CountDocuments(ctx, bson.D{{Key: "value", Value: "first of the new owner"}})
		return err == nil && int(n) == len(g.keysComes)
	})
}

// checkUndisturbed waits until all messages are handled, and checks that each of the n long ones ran once, without a letter.
func (g *movingGroup) checkUndisturbed(n int) {
	g.Helper()
	partitions := len(g.keysStay) + len(g.keysComes)
	g.waitUntil("the end of all messages", func(context.Context) bool {
		return sumOffsets(g.readCommitted(partitions)) == int64(10*partitions+n+len(g.keysComes))
	})
	if runs := g.runs.Load(); int(runs) != n {
		g.Errorf("the handlers of %d messages of partitions that stay ran %d times", n, runs)
	}
	for l, err := range g.newDesk().List(g.context(), deadletter.Query{}) {
		if err != nil {
			g.Fatal(err)
		}
		g.Errorf("a message is a dead letter: class %s, %s", l.Class, l.Reason)
	}
}

// holdBetween holds a transaction open for d, between two statements.
func holdBetween(d time.Duration) func(ctx context.Context, k *kit) error {
	return func(ctx context.Context, k *kit) error {
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return ctx.Err()
		}
		_, err := k.db.Collection("one").InsertOne(ctx, bson.D{{Key: "id", Value: "second"}})
		return err
	}
}

// holdInside runs one statement that takes four seconds.
func holdInside(ctx context.Context, k *kit) error {
	return k.db.Collection("one").FindOne(ctx, bson.D{{Key: "$where", Value: "sleep(4000) || true"}}).Err()
}

// A cooperative rebalance stops only the partitions that move. The transactions of the partitions that stay go on.
func TestARebalanceEndsNoTransactionOfAMemberThatStays(t *testing.T) {
	t.Parallel()
	for name, work := range map[string]func(ctx context.Context, k *kit) error{
		"between two statements": holdBetween(4 * time.Second), "in a statement": holdInside,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newMovingGroup(t, 4, work, withTries(1))
			g.startLong(1)
			g.attachMoved()
			g.checkUndisturbed(1)
		})
	}
}

// The new owners of 25 partitions attach one after another, while the member that stays handles 25 slow messages.
func TestARebalanceOfFiftyPartitionsInterruptsNothing(t *testing.T) {
	t.Parallel()
	g := newMovingGroup(t, 50, holdBetween(8*time.Second), withTries(1))
	g.startLong(25)
	g.attachMoved()
	g.checkUndisturbed(25)
}

// The sessions of the driver's pool are shared by everything in the process.
func TestARebalanceEndsNoTransactionOfTheService(t *testing.T) {
	t.Parallel()
	g := newMovingGroup(t, 4, func(context.Context, *kit) error { return nil })
	box, err := outbox.New(g.db)
	if err != nil {
		t.Fatal(err)
	}
	begun := make(chan struct{}, 10)
	done := make(chan error, 1)
	var runs atomic.Int32
	// For example the handler of a request.
	go func() {
		done <- box.Transaction(g.context(), func(ctx context.Context) error {
			runs.Add(1)
			if _, err := g.db.Collection("one").InsertOne(ctx, bson.D{{Key: "y", Value: 1}}); err != nil {
				return err
			}
			begun <- struct{}{}
			return holdInside(ctx, g.kit)
		})
	}()

	g.waitFor("the transaction", begun)
	g.attachMoved()
	if err := <-done; err != nil || runs.Load() != 1 {
		t.Errorf("a transaction of the service: %v after %d runs", err, runs.Load())
	}
}

// A process that looks dead, because it gave no sign of life, loses the transactions of its handlers. Its other transactions
// use other sessions, although the consumer and the service have the same client.
func TestOnlyTransactionsOfTheConsumerAreEnded(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.newCollection("one")
	insert := k.insertInto("effects")
	c := k.newConsumer(consumer.WithSharedTransaction(1))
	hold := newBlocked("long", func(context.Context, *consumer.Message) error { return nil })
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if err := insert(ctx, m); err != nil {
			return err
		}
		return hold.Handle(ctx, m)
	})
	// The sessions that the consumer has used are free again.
	k.publish(newMessages(10, 20)...)
	k.start(c)
	k.waitCount("effects", 20)

	box, err := outbox.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	begun, release := make(chan struct{}, 100), make(chan struct{})
	done := make(chan error, 1)
	// More transactions at once than the consumer has used sessions.
	const others = 40
	var runs atomic.Int32
	for range others {
		go func() {
			done <- box.Transaction(k.context(), func(ctx context.Context) error {
				runs.Add(1)
				_, err := k.db.Collection("one").InsertOne(ctx, bson.D{{Key: "y", Value: 1}})
				begun <- struct{}{}
				<-release
				return err
			})
		}()
	}
	for range others {
		k.waitFor("a transaction", begun)
	}
	k.publish(newMessage("a", "counted", "long"))
	k.waitFor("the handler", hold.reached)

	_, err = k.db.Collection("inbox_tenures").UpdateMany(k.context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "at", Value: time.Unix(0, 0)}}}})
	if err != nil {
		t.Fatal(err)
	}
	next, err := mongostore.Open(k.db, inbox.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := next.Attach(k.context(), k.group+"/counted", k.topic, 0, inbox.Log{End: -1, Epoch: -1}); err != nil {
		t.Fatal(err)
	}
	close(release)
	for range others {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if n := runs.Load(); n != others {
		t.Errorf("%d transactions of the service ran %d times", others, n)
	}
	close(hold.release)
	k.waitCount("effects", 21)
}

// If an operator ends a session, the server interrupts the statement in progress. The message is not to blame.
func TestAnInterruptedTransactionRunsAgain(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	if _, err := k.newCollection("one").InsertOne(k.context(), bson.D{{Key: "x", Value: 1}}); err != nil {
		t.Fatal(err)
	}
	insert := k.insertInto("effects")
	running := make(chan bson.Raw, 10)
	c := k.newConsumer(consumer.WithSharedTransaction(1))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if err := insert(ctx, m); err != nil {
			return err
		}
		running <- mongo.SessionFromContext(ctx).ID()
		return k.db.Collection("one").FindOne(ctx, bson.D{{Key: "$where", Value: "sleep(2000) || true"}}).Err()
	}, consumer.WithRetry(consumer.NoRetry()))
	k.publish(newMessage("a", "counted", "0"))
	k.start(c)

	lsid := <-running
	inProgress := bson.D{{Key: "lsid.id", Value: lsid.Lookup("id")}, {Key: "command.find", Value: "one"}}
	admin := k.db.Client().Database("admin")
	k.waitUntil("the statement", func(ctx context.Context) bool {
		cur, err := admin.Aggregate(ctx, mongo.Pipeline{
			{{Key: "$currentOp", Value: bson.D{}}}, {{Key: "$match", Value: inProgress}},
		})
		return err == nil && cur.Next(ctx) && cur.Close(ctx) == nil
	})
	if err := mongodb.KillSessions(k.context(), k.db.Client(), []bson.Raw{lsid}); err != nil {
		t.Fatal(err)
	}
	k.waitUntil("the offset", func(context.Context) bool { return k.readCommitted(1)[0] == 1 })
	k.checkOnce("effects", 1)
	if n, err := k.newDesk().Count(k.context(), deadletter.Query{}); err != nil || n != 0 {
		t.Errorf("%d dead letters, %v", n, err)
	}
}

// A handler that outlives the drain keeps its partition in the inbox, although another member has the partition in Kafka. Its member
// goes on in the next generation, and that other member ends none of its transactions.
func TestAnAbandonedHandlerCostsNoOtherTransactionOfItsMember(t *testing.T) {
	t.Parallel()
	const partitions = 4
	k := newKit(t, partitions)
	other := newKitOf(k)
	release := make(chan struct{})
	stubborn, long, first := make(chan struct{}, 10), make(chan struct{}, 10), make(chan struct{}, 10)
	var runs atomic.Int32
	var mu sync.Mutex
	keys := map[int32]string{}
	newMember := func(k *kit, isFirst bool) *consumer.Consumer {
		insert := k.insertInto("effects")
		c := k.newConsumer(consumer.WithSharedTransaction(1), consumer.WithDrain(100*time.Millisecond))
		addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
			if err := insert(ctx, m); err != nil {
				return err
			}
			switch string(m.Value) {
			case "stubborn":
				if isFirst {
					stubborn <- struct{}{}
					// It does not look at its context.
					<-release
				}
			case "long":
				runs.Add(1)
				long <- struct{}{}
				return holdBetween(4*time.Second)(ctx, k)
			case "first":
				first <- struct{}{}
			default:
				mu.Lock()
				defer mu.Unlock()
				keys[m.Partition] = string(m.Key)
			}
			return nil
		})
		return c
	}

	var ms []*consumer.Message
	for i := range 10 * partitions {
		ms = append(ms, newMessage(fmt.Sprintf("key%03d", i), "counted", "0"))
	}
	k.publish(ms...)
	k.newCollection("one")
	one, two := newMember(k, true), newMember(other, false)
	k.start(one)
	k.waitCount("effects", len(ms))
	mu.Lock()
	keyOf := maps.Clone(keys)
	mu.Unlock()
	if len(keyOf) != partitions {
		t.Fatalf("keys of %d partitions", len(keyOf))
	}

	// Partitions that are next to each other go to different members, so one of these two moves.
	k.publish(newMessage(keyOf[0], "counted", "stubborn"), newMessage(keyOf[1], "counted", "stubborn"))
	k.waitFor("a stubborn handler", stubborn)
	k.waitFor("the other stubborn handler", stubborn)
	k.start(two)
	k.waitUntil("each member to have half of the partitions", func(context.Context) bool {
		return len(one.Status().Partitions) == partitions/2 && len(two.Status().Partitions) == partitions/2
	})
	// Each member has one partition without a stubborn handler.
	free := func(c *consumer.Consumer) string {
		for _, p := range c.Status().Partitions {
			if p.Partition > 1 {
				return keyOf[p.Partition]
			}
		}
		t.Fatalf("partitions %v", c.Status().Partitions)
		return ""
	}

	k.publish(newMessage(free(one), "counted", "long"))
	k.waitFor("the long handler", long)
	k.publish(newMessage(free(two), "counted", "first"))
	k.waitFor("the first message of the other member", first)
	k.waitUntil("the long message", func(ctx context.Context) bool {
		n, err := k.db.Collection("effects").CountDocuments(ctx, bson.D{{Key: "value", Value: "long"}})
		return err == nil && n == 1
	})
	close(release)
	if n := runs.Load(); n != 1 {
		t.Errorf("the handler of another partition ran %d times", n)
	}
	k.waitUntil("the offsets", func(context.Context) bool { return sumOffsets(k.readCommitted(partitions)) == int64(len(ms)+4) })
}
