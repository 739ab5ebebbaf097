package requeues

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// bench is a state database with letters.
type bench struct {
	t                *testing.T
	db               *mongo.Database
	letters, waiting *mongo.Collection
	app              string // name of the client, for fail points
}

func setUp(t *testing.T) *bench {
	t.Helper()
	app := stacktest.Name(t)
	db := mongodb.Database(stacktest.Client(t, options.Client().SetAppName(app)), stacktest.Database(t, stacktest.Client(t)).Name())
	b := &bench{t: t, db: db, letters: db.Collection("outrelay_letters"), waiting: db.Collection("outrelay_waiting"), app: app}
	for coll, indexes := range map[*mongo.Collection][]mongodb.Index{b.letters: letters.Indexes(), b.waiting: waiting.Indexes()} {
		if err := mongodb.EnsureIndexSet(t.Context(), coll, indexes); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

func (b *bench) newDesk() Desk { return NewDesk(b.letters, b.waiting, "orders", "ann") }

// Fenced is a transaction of an owner that nobody deposes.
func (b *bench) Fenced(ctx context.Context, _ bson.D, fn func(context.Context) error) error {
	return mongodb.InTransaction(ctx, b.db.Client(), fn)
}

// newLetter returns the letter of an envelope.
func (b *bench) newLetter(doc bson.D, change ...func(*letters.Letter)) letters.Letter {
	b.t.Helper()
	raw, err := bson.Marshal(doc)
	if err != nil {
		b.t.Fatal(err)
	}
	l := letters.Letter{
		Watcher: "orders", NS: "shop.outbox", Raw: raw, Class: record.Malformed, Reason: "type is missing", Pos: "8265",
		Source: letters.Source{Kind: "relay", Watcher: "orders"},
	}
	for _, c := range change {
		c(&l)
	}
	return l
}

// valid returns an envelope that envelope.Parse accepts, with the fields that an insert sets.
func valid(id any, fields ...bson.E) bson.D {
	return append(bson.D{
		{Key: "_id", Value: id},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: "7"},
		{Key: "type", Value: "OrderPlaced"},
		{Key: "payload", Value: bson.Binary{Data: []byte{1, 0, 2}}},
		{Key: "ts", Value: bson.Timestamp{T: 5, I: 6}},
		{Key: "slot", Value: keyhash.Slot([]byte("7"))},
	}, fields...)
}

// write stores letters, and returns their ids.
func (b *bench) write(list ...letters.Letter) []string {
	b.t.Helper()
	ids := make([]string, len(list))
	prepared := make([]*letters.Prepared, len(list))
	for i, l := range list {
		p, err := letters.Prepare(l)
		if err != nil {
			b.t.Fatal(err)
		}
		prepared[i], ids[i] = p, p.ID()
	}
	err := letters.WriteChunks(b.t.Context(), b, b.letters, prepared)
	if err == nil {
		err = b.Fenced(b.t.Context(), nil, func(tx context.Context) error {
			return letters.Write(tx, b.letters, time.Now().Add(-time.Minute), prepared)
		})
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return ids
}

// fill writes n letters, in the order of the stream.
func (b *bench) fill(n int) []string {
	b.t.Helper()
	list := []letters.Letter{}
	for i := range n {
		list = append(list, b.newLetter(valid(fmt.Sprintf("id-%06d", (i*7919)%100000), bson.E{Key: "n", Value: i}), func(l *letters.Letter) {
			l.Pos = fmt.Sprintf("82%08X", i)
			l.NS = fmt.Sprintf("tenant-%d.outbox", i%7)
		}))
	}
	return b.write(list...)
}

func (b *bench) requeue(q letters.Query, o Options) Outcome {
	b.t.Helper()
	q.Watcher = "orders"
	outcome, err := b.newDesk().Requeue(b.t.Context(), q, o, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return outcome
}

func (b *bench) open(id string) letters.Dead {
	b.t.Helper()
	d, err := letters.Open(b.t.Context(), b.letters, id)
	if err != nil {
		b.t.Fatal(err)
	}
	return d
}

// storedEntry is a document of the collection waiting.
type storedEntry struct {
	Watcher, NS, Key, Pos, Reason, Origin string
	ID                                    bson.RawValue `bson:"id"`
	Delivery, Slot, Attempts              int32
	Topics                                string    // "" stands for those of the routing
	NextAt                                time.Time `bson:"nextAt"`
	ReplayOf                              string    `bson:"replayOf"`
	Envelope                              bson.Raw
}

// entries returns what waits, in the order of the positions.
func (b *bench) entries(filter bson.D) []storedEntry {
	b.t.Helper()
	list, err := mongodb.FindAll[storedEntry](b.t.Context(), mongodb.Majority(b.waiting), "reading", filter,
		options.Find().SetSort(bson.D{{Key: "pos", Value: 1}}))
	if err != nil {
		b.t.Fatal(err)
	}
	return list
}

// ofID selects the entries of an envelope.
func ofID(id any) bson.D { return bson.D{{Key: "id", Value: id}} }

func TestN18_ARequeueIsTheNextDeliveryOfTheSameEnvelope(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	oid := bson.NewObjectID()
	l := b.newLetter(valid(oid, bson.E{Key: "own", Value: "kept"}), func(l *letters.Letter) {
		l.Delivery, l.Topic, l.Slot = 2, "orders", 5
		l.Class, l.Reason = record.AttemptsExhausted, "10 attempts"
	})
	id := b.write(l)[0]

	before := time.Now()
	if got := b.requeue(letters.Query{Letters: []string{id}}, Options{}); got.Requeued != 1 || got.Rejected != 0 {
		t.Fatalf("requeue: got %+v, want 1 requeued", got)
	}
	list := b.entries(bson.D{})
	if len(list) != 1 {
		t.Fatalf("%d envelopes wait, want 1", len(list))
	}
	e := list[0]
	if e.Watcher != "orders" || e.NS != "shop.outbox" || e.Key != "7" || e.Pos != "8265" || e.Slot != keyhash.Slot([]byte("7")) || e.ID.ObjectID() != oid {
		t.Errorf("the place of the entry: %+v", e)
	}
	if e.Reason != "queued" || e.Origin != "requeue" || e.Delivery != 3 || e.Attempts != 0 || e.Topics != "" || e.ReplayOf != id {
		t.Errorf("the fields of the new delivery: %+v", e)
	}
	if e.NextAt.Sub(before).Abs() > time.Minute || !bytes.Equal(e.Envelope, l.Raw) {
		t.Errorf("sent at %v: %s", e.NextAt, e.Envelope)
	}

	d := b.open(id)
	if d.Requeued == nil || d.Requeued.Actor != "ann" || d.Requeued.Delivery != 3 || d.Requeued.Run == "" ||
		d.Requeued.At.Sub(before).Abs() > time.Minute {
		t.Errorf("the requeue on the letter: %+v", d.Requeued)
	}
	if want := letters.VersionOf(2, true); d.Version() != want || !bytes.Equal(d.Envelope, l.Raw) {
		t.Errorf("the letter: got version %d, want %d and the unchanged envelope: %+v", d.Version(), want, d)
	}
	if again := b.requeue(letters.Query{Letters: []string{id}}, Options{}); again.Requeued != 0 {
		t.Errorf("a second requeue: %+v, want none", again)
	}

	// The new delivery dies too, and gets its own letter with a reference to the first.
	l.Delivery, l.ReplayOf = 3, id
	second := b.open(b.write(l)[0])
	if second.ID == id || second.ReplayOf != id || second.Requeued != nil || second.Key != "7" || second.Type != "OrderPlaced" {
		t.Errorf("the second letter: %+v", second)
	}
}

// Two events of one id are two deliveries, and two topics that rejected one event are one.
func TestLettersOfOneIDAreRequeuedApart(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	first := b.newLetter(valid("order-7", bson.E{Key: "n", Value: 1}))
	second := b.newLetter(valid("order-7", bson.E{Key: "n", Value: 2}), func(l *letters.Letter) { l.Pos = "8266" })
	topic := func(name string) letters.Letter {
		return b.newLetter(valid("two topics"), func(l *letters.Letter) { l.Topic, l.Pos = name, "8267" })
	}
	b.write(first, second, topic("a"), topic("b"))
	if got := b.requeue(letters.Query{All: true}, Options{}); got.Requeued != 4 || got.Rejected != 0 {
		t.Fatalf("got %+v, want 4 requeued", got)
	}

	list := b.entries(ofID("order-7"))
	if len(list) != 2 || list[0].Envelope.Lookup("n").Int32() != 1 || list[1].Envelope.Lookup("n").Int32() != 2 {
		t.Errorf("of two events with one id wait %+v", list)
	}
	if list := b.entries(ofID("two topics")); len(list) != 1 || list[0].Topics != "" {
		t.Errorf("of an event that two topics rejected waits %+v, want it for all topics", list)
	}
}

// Two topics have rejected an event. The requeue of one letter has left a letter before the other one is requeued.
func TestN18_ALaterRequeueOfAnEventIsAnotherDelivery(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	in := func(topic string, delivery int32) letters.Letter {
		return b.newLetter(valid("x"), func(l *letters.Letter) { l.Topic, l.Delivery = topic, delivery })
	}
	ids := b.write(in("a", 0), in("b", 0))
	b.requeue(letters.Query{Letters: ids[:1]}, Options{})
	if _, err := b.waiting.DeleteMany(t.Context(), ofID("x")); err != nil {
		t.Fatal(err)
	}
	b.write(in("b", 1))

	b.requeue(letters.Query{Letters: ids[1:]}, Options{})
	if list := b.entries(ofID("x")); len(list) != 1 || list[0].Delivery != 2 {
		t.Errorf("got the entries %+v, want one of delivery 2", list)
	}
	if d := b.open(ids[1]); d.Requeued == nil || d.Requeued.Delivery != 2 {
		t.Errorf("the requeue on the letter: got %+v, want delivery 2", d.Requeued)
	}
}

// Letters of two topics are sent to the topic that an operator has chosen, each event once.
func TestARequeueToATopic(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	var list []letters.Letter
	for _, topic := range []string{"orders.v1", "audit"} {
		list = append(list, b.newLetter(valid("two topics"), func(l *letters.Letter) { l.Topic = topic }))
	}
	ids := b.write(append(list, b.newLetter(valid("one topic"), func(l *letters.Letter) { l.Pos = "8266" }))...)
	if got := b.requeue(letters.Query{All: true}, Options{Topic: "orders.v2"}); got.Requeued != 3 || got.Rejected != 0 {
		t.Fatalf("got %+v, want 3 requeued", got)
	}

	entries := b.entries(bson.D{})
	if len(entries) != 2 || entries[0].Topics != "orders.v2" || entries[1].Topics != "orders.v2" {
		t.Errorf("got the entries %+v, want one of each event, for orders.v2", entries)
	}
	for i, id := range ids {
		if d := b.open(id); d.Requeued == nil || d.Requeued.Topic != "orders.v2" {
			t.Errorf("letter %d: got the requeue %+v, want its topic", i, d.Requeued)
		}
	}
}

func TestARequeueRejectsUndeliverableLetters(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	past, future := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	list := []letters.Letter{
		b.newLetter(bson.D{{Key: "_id", Value: "bare"}}),
		b.newLetter(bson.D{{Key: "_id", Value: "malformed"}, {Key: "aggregatetype", Value: "order"}}),
		b.newLetter(valid(bson.A{})),
		b.newLetter(valid("expired", bson.E{Key: "expiresAt", Value: past})),
		b.newLetter(valid("good", bson.E{Key: "expiresAt", Value: future})),
		b.newLetter(valid("last"), func(l *letters.Letter) { l.Delivery = 1<<31 - 1 }),
		b.newLetter(bson.D{}, func(l *letters.Letter) { l.Raw = []byte("no BSON") }),
		b.newLetter(valid("no position")[:6], func(l *letters.Letter) { l.Pos = "" }),
	}
	ids := b.write(list...)
	reasons := map[string]string{
		ids[0]: "only its id is left",
		ids[1]: "aggregateid",
		ids[2]: "append the event again with another id",
		ids[3]: "it has expired",
		ids[5]: "the highest delivery number",
		ids[6]: "not valid BSON",
	}
	for _, dryRun := range []bool{true, false} {
		got := b.requeue(letters.Query{All: true}, Options{DryRun: dryRun})
		if got.Requeued != 2 || got.Rejected != int64(len(reasons)) || len(got.Why) != len(reasons) {
			t.Fatalf("dry run %v: got %+v, want 2 requeued and %d rejected", dryRun, got, len(reasons))
		}
		for _, why := range got.Why {
			want := reasons[why.Letter.ID]
			if want == "" || !strings.Contains(why.Error(), want) {
				t.Errorf("the reason of %s: got %v, want %q", why.Letter.ID, why, want)
			}
			if d := b.open(why.Letter.ID); d.Requeued != nil {
				t.Errorf("%s is rejected and marked as requeued", why.Letter.ID)
			}
		}
		if marked := b.open(ids[4]).Requeued != nil; marked == dryRun {
			t.Errorf("dry run %v: the letter is marked as requeued: %v", dryRun, marked)
		}
		if n := len(b.entries(bson.D{})); (n == 0) != dryRun {
			t.Errorf("dry run %v: %d envelopes wait", dryRun, n)
		}
	}
	// The stamp of the insert takes the place of a missing position, and slot 0 of a missing one.
	if e := b.entries(ofID("no position"))[0]; e.Pos != "820000000500000006" || e.Slot != 0 {
		t.Errorf("without a position: %+v", e)
	}

	if got := b.requeue(letters.Query{Letters: ids[3:4]}, Options{IgnoreExpiry: true}); got.Requeued != 1 {
		t.Errorf("an expired envelope: got %+v, want 1 requeued", got)
	}
	e := b.entries(ofID("expired"))[0]
	if _, err := e.Envelope.LookupErr("expiresAt"); err == nil || e.Envelope.Lookup("type").StringValue() != "OrderPlaced" {
		t.Errorf("the requeued envelope would expire again: %s", e.Envelope)
	}
	if _, err := b.newDesk().Requeue(t.Context(), letters.Query{Watcher: "orders"}, Options{}, nil); !errors.Is(err, letters.ErrEmptyQuery) {
		t.Errorf("an empty query: got %v, want %v", err, letters.ErrEmptyQuery)
	}
}

// An envelope that MongoDB rejects must not keep the other letters of the part.
func TestAnEnvelopeThatMongoDBRejectsIsRejectedAlone(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	ids := b.fill(20)
	// With the fields of a waiting envelope, the document exceeds the limit.
	large := b.write(b.newLetter(valid("large", bson.E{Key: "extra", Value: make([]byte, 16<<20-210)}), func(l *letters.Letter) { l.Pos = "8200000003" }))
	// With its key as well, the driver does not even send it.
	key := strings.Repeat("k", 30<<10)
	doc := valid("keyed", bson.E{Key: "extra", Value: make([]byte, 16<<20-31<<10)})
	doc[2].Value = key
	keyed := b.write(b.newLetter(doc, func(l *letters.Letter) { l.Pos = "8200000004" }))
	reject := bson.D{{Key: "collMod", Value: b.waiting.Name()}, {Key: "validator", Value: bson.D{{Key: "envelope.n", Value: bson.D{{Key: "$ne", Value: 11}}}}}}
	if err := b.db.RunCommand(t.Context(), reject).Err(); err != nil {
		t.Fatal(err)
	}

	got := b.requeue(letters.Query{All: true}, Options{})
	if got.Requeued != 19 || got.Rejected != 3 || len(b.entries(bson.D{})) != 19 {
		t.Fatalf("got %+v, want 19 requeued and 3 rejected", got)
	}
	for _, why := range got.Why {
		if why.Letter.ID != large[0] && why.Letter.ID != keyed[0] && why.Letter.ID != ids[11] || !strings.Contains(why.Reason, "MongoDB rejects") {
			t.Errorf("rejected: %v", why)
		}
		if b.open(why.Letter.ID).Requeued != nil {
			t.Errorf("%s is rejected and marked as requeued", why.Letter.ID)
		}
	}
}

// MongoDB reports some rejections of a document as an error of the command, such as those for its size or its fields. A full disk is no
// rejection.
func TestARejectionMayBeAnErrorOfTheCommand(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.fill(4)
	fail := func(code int) func() {
		return stacktest.FailCommand(t, b.app, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"insert"}}, {Key: "errorCode", Value: code}})
	}

	off := fail(121)
	got := b.requeue(letters.Query{All: true}, Options{})
	off()
	if got.Requeued != 0 || got.Rejected != 4 {
		t.Errorf("a rejection: got %+v, want 4 rejected", got)
	}

	off = fail(14031)
	got, err := b.newDesk().Requeue(t.Context(), letters.Query{Watcher: "orders", All: true}, Options{}, nil)
	off()
	if err == nil || got.Rejected != 0 {
		t.Errorf("a full disk: got %+v, %v, want an error", got, err)
	}
	if got := b.requeue(letters.Query{All: true}, Options{}); got.Requeued != 4 {
		t.Errorf("then: got %+v, want 4 requeued", got)
	}
}

func TestN20_ALargeLetterComesBackWhole(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	l := b.newLetter(valid("large", bson.E{Key: "extra", Value: bytes.Repeat([]byte{7}, 15<<20+100)}))
	b.write(l)
	if got := b.requeue(letters.Query{All: true}, Options{}); got.Requeued != 1 {
		t.Fatalf("requeue: got %+v, want 1 requeued", got)
	}
	if e := b.entries(bson.D{})[0]; !bytes.Equal(e.Envelope, l.Raw) {
		t.Errorf("%d bytes wait, want %d", len(e.Envelope), len(l.Raw))
	}
}

func TestARequeueConvergesAfterACrashInTheMiddle(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	const n = 3*atOnce + 100
	b.fill(n)

	// The requeue is interrupted after its first part.
	ctx, cancel := context.WithCancel(t.Context())
	got, err := b.newDesk().Requeue(ctx, letters.Query{Watcher: "orders", All: true}, Options{}, func(Outcome) { cancel() })
	if err == nil || got.Requeued != atOnce {
		t.Fatalf("after the first part: got %+v, %v, want %d and an error", got, err, atOnce)
	}
	// Parts follow the order of the stream, over all outboxes.
	list := b.entries(bson.D{})
	if len(list) != atOnce || list[atOnce-1].Envelope.Lookup("n").Int32() != atOnce-1 {
		t.Errorf("%d envelopes wait, want the first %d", len(list), atOnce)
	}

	// Some of the first part are sent before the second call.
	if _, err := b.waiting.DeleteMany(t.Context(), bson.D{{Key: "envelope.n", Value: bson.D{{Key: "$lt", Value: 100}}}}); err != nil {
		t.Fatal(err)
	}
	if got := b.requeue(letters.Query{All: true}, Options{}); got.Requeued != n-atOnce || got.Rejected != 0 {
		t.Errorf("the second call: got %+v, want %d requeued", got, n-atOnce)
	}
	if got := b.requeue(letters.Query{All: true}, Options{}); got.Requeued != 0 || got.Rejected != 0 {
		t.Errorf("the third call: got %+v, want none", got)
	}
	list = b.entries(bson.D{})
	if len(list) != n-100 {
		t.Errorf("%d envelopes wait, want each of the remaining %d once", len(list), n-100)
	}
	for _, e := range list {
		if e.Delivery != 1 {
			t.Fatalf("%v waits as delivery %d", e.ID, e.Delivery)
		}
	}
	c, err := letters.Count(t.Context(), b.letters, letters.Query{Watcher: "orders", RequeueStatus: letters.Requeued})
	if err != nil || c != n {
		t.Errorf("requeued letters: got %d, %v, want %d", c, err, n)
	}
}

// A requeue that ends between its statements has done nothing, and one whose commit has an unknown outcome is done once.
func TestARequeueEndsBetweenItsStatements(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	b.fill(40)
	q := letters.Query{Watcher: "orders", All: true}

	// The update marks the letters.
	for name, command := range map[string]string{"mark": "update", "commit": "commitTransaction"} {
		off := stacktest.FailCommand(t, b.app, bson.D{{Key: "skip", Value: 0}}, bson.D{{Key: "failCommands", Value: bson.A{command}}, {Key: "errorCode", Value: 2}})
		got, err := b.newDesk().Requeue(t.Context(), q, Options{}, nil)
		off()
		if err == nil || got.Requeued != 0 {
			t.Errorf("%s: got %+v, %v, want an error", name, got, err)
		}
		marked, err := letters.Count(t.Context(), b.letters, letters.Query{Watcher: "orders", RequeueStatus: letters.Requeued})
		if n := len(b.entries(bson.D{})); n != 0 || marked != 0 || err != nil {
			t.Errorf("%s: %d envelopes wait, %d letters are marked, %v; want none", name, n, marked, err)
		}
	}

	off := stacktest.FailCommand(t, b.app, bson.D{{Key: "times", Value: 1}}, bson.D{
		{Key: "failCommands", Value: bson.A{"commitTransaction"}},
		{Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 91}, {Key: "errmsg", Value: "stopping"}}},
	})
	defer off()
	if got := b.requeue(q, Options{}); got.Requeued != 40 || len(b.entries(bson.D{})) != 40 {
		t.Errorf("a commit with an unknown outcome: got %+v and %d waiting, want 40", got, len(b.entries(bson.D{})))
	}
}

func TestTwoRequeuesAtOnceDeliverOnce(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	const n = 800
	b.fill(n)

	type result struct {
		outcome Outcome
		err     error
	}
	results := make(chan result)
	for range 2 {
		go func() {
			outcome, err := b.newDesk().Requeue(t.Context(), letters.Query{Watcher: "orders", All: true}, Options{}, nil)
			results <- result{outcome, err}
		}()
	}
	var sum int64
	for range 2 {
		r := <-results
		if r.err != nil {
			t.Error(r.err)
		}
		sum += r.outcome.Requeued
	}
	list := b.entries(bson.D{})
	if sum != n || len(list) != n {
		t.Errorf("got %d requeued and %d waiting, want %d", sum, len(list), n)
	}
	for _, e := range list {
		if e.Delivery != 1 {
			t.Fatalf("%v waits as delivery %d", e.ID, e.Delivery)
		}
	}
}

// A large part is divided by its bytes, so that a transaction ends in time.
func TestAPartOfLargeLettersIsBounded(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	for i := range 4 {
		b.write(b.newLetter(valid(i, bson.E{Key: "extra", Value: make([]byte, 3<<20)}), func(l *letters.Letter) { l.Pos = fmt.Sprintf("82%08X", i) }))
	}
	b.write(b.newLetter(valid("x"), func(l *letters.Letter) { l.Watcher = "other" }))
	var totals []int64
	_, err := b.newDesk().Requeue(t.Context(), letters.Query{Watcher: "orders", All: true}, Options{}, func(o Outcome) {
		totals = append(totals, o.Requeued+o.Rejected)
	})
	if err != nil || len(totals) != 2 || totals[0] != 2 || totals[1] != 4 {
		t.Errorf("totals %v, %v, want 2 and 4", totals, err)
	}
}

// A letter that is discarded after a requeue has read it stays discarded, and its event is not sent.
func TestALetterThatIsDiscardedMeanwhileIsNotRequeued(t *testing.T) {
	t.Parallel()
	b := setUp(t)
	ids := b.fill(2)
	query := letters.Query{Watcher: "orders", All: true}
	scan, err := letters.NewScan(t.Context(), b.letters, query)
	if err != nil {
		t.Fatal(err)
	}
	list, err := scan.Next(t.Context(), atOnce, mongodb.MaxBytes)
	if err != nil || len(list) != 2 {
		t.Fatalf("%d letters, %v", len(list), err)
	}

	one := letters.Query{Watcher: "orders", Letters: ids[:1]}
	how := letters.Discarding{Actor: "bob", Archive: time.Hour}
	if n, err := letters.Discard(t.Context(), b.letters, b.db.Collection("outrelay_watchers"), one, how, nil); n != 1 || err != nil {
		t.Fatalf("%d discarded, %v", n, err)
	}
	outcome, err := b.newDesk().requeueHalves(t.Context(), list, Options{})
	if n := len(b.entries(bson.D{})); err != nil || outcome.Requeued != 1 || n != 1 {
		t.Errorf("%d requeued and %d waiting, %v, want 1 of each", outcome.Requeued, n, err)
	}
	if letter := b.open(ids[0]); letter.Requeued != nil || letter.Archived == nil {
		t.Errorf("the discarded letter: requeued %+v, archived %+v", letter.Requeued, letter.Archived)
	}

	// From the archive it can be requeued.
	if outcome := b.requeue(letters.Query{Letters: ids[:1], Archived: true}, Options{}); outcome.Requeued != 1 {
		t.Errorf("%d requeued from the archive, want 1", outcome.Requeued)
	}
}
