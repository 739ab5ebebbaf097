package admin_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/requeues"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// planted is business data that no entry of the log may carry.
const planted = "hunter2"

// office is an operator of a watcher that somebody runs, with two outboxes.
type office struct {
	t     *testing.T
	op    admin.Operator
	state state.Database
	owner *lease.Held
	a, b  *mongo.Collection
}

func openOffice(t *testing.T) *office {
	t.Helper()
	c := stacktest.Client(t)
	f := &office{t: t, state: statetest.New(t, c)}
	f.a, f.b = stacktest.Database(t, c).Collection("outbox"), stacktest.Database(t, c).Collection("outbox")
	f.owner = acquireLease(t, f.state)
	f.op = admin.Operator{State: f.state, Watcher: "orders", Actor: "ann"}
	for i, coll := range []*mongo.Collection{f.a, f.b} {
		if _, err := outboxes.NewRegistry(f.state.Collection("collections")).Register(t.Context(), [16]byte{byte(i + 1)}, mongodb.Namespace(coll), "orders", bson.Timestamp{}); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// moveToDead stores a dead letter of an envelope of coll, and returns the id of the letter.
func (f *office) moveToDead(coll *mongo.Collection, class record.Class, doc bson.D, change ...func(*letters.Letter)) string {
	f.t.Helper()
	l := admintest.Letter(f.t, mongodb.Namespace(coll), "8265", doc)
	l.Class = class
	for _, c := range change {
		c(&l)
	}
	return admintest.Store(f.t, f.state.Collection("letters"), l)[0]
}

// requeueAndSend requeues a letter, and sends its envelope as the owner does.
func (f *office) requeueAndSend(id string) {
	f.t.Helper()
	if _, err := f.op.Letters().Requeue(f.t.Context(), admin.DeadFilter{IDs: []string{id}}, admin.DeadOptions{}, nil); err != nil {
		f.t.Fatal(err)
	}
	if res, err := f.state.Collection("waiting").DeleteMany(f.t.Context(), bson.D{{Key: "id", Value: id}}); err != nil || res.DeletedCount == 0 {
		f.t.Fatalf("%+v, %v", res, err)
	}
}

// again makes a letter that of the first requeue.
func again(l *letters.Letter) { l.Delivery = 1 }

func letterOf(id any, payload any) bson.D {
	return bson.D{{Key: "_id", Value: id}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "7"}, {Key: "type", Value: "OrderPlaced"}, {Key: "payload", Value: payload}}
}

func (f *office) readLog() []nodes.AuditEntry {
	f.t.Helper()
	list, err := nodes.NewAuditLog(f.state.Collection("audit"), "", "").Latest(f.t.Context(), 100)
	if err != nil {
		f.t.Fatal(err)
	}

	for _, e := range list {
		if strings.Contains(string(e.Fields), planted) {
			f.t.Errorf("%s carries a payload: %s", e.Kind, e.Fields)
		}
		if e.Fields.Lookup("actor").StringValue() != "ann" {
			f.t.Errorf("%s is not by ann", e.Kind)
		}
	}

	return list
}

func (f *office) countEnvelopes(coll *mongo.Collection) int64 {
	f.t.Helper()
	n, err := mongodb.Majority(coll).CountDocuments(f.t.Context(), bson.D{})
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

func TestDeadLettersAreSeenOverAllCollections(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	oid := bson.NewObjectID()
	f.moveToDead(f.a, record.RecordRejected, append(letterOf("both", planted), bson.E{Key: "secretfield", Value: planted}), again)
	f.moveToDead(f.a, record.RecordRejected, letterOf("both", planted))
	f.moveToDead(f.b, record.Malformed, letterOf("both", planted))
	f.moveToDead(f.b, record.Malformed, letterOf(oid, bson.D{{Key: "a", Value: 1}}))
	page, err := f.op.Letters().List(t.Context(), admin.DeadFilter{}, 3, "")
	if err != nil || len(page.Items) != 3 || page.Total != 4 || page.Next == "" || page.Items[0].ID != oid.Hex() || page.Items[0].Key != "7" {
		t.Fatalf("%+v, %v", page, err)
	}
	if page, err = f.op.Letters().List(t.Context(), admin.DeadFilter{}, 3, page.Next); err != nil || len(page.Items) != 1 || page.Next != "" {
		t.Errorf("%+v, %v", page, err)
	}

	for want, filter := range map[int64]admin.DeadFilter{
		1: {IDs: []string{oid.Hex()}}, 2: {Class: "malformed", RequeueStatus: "any"}, 3: {IDs: []string{"both"}}, 0: {From: time.Now().Add(time.Hour)},
	} {
		if n, err := f.op.Letters().Count(t.Context(), filter); err != nil || n != want {
			t.Errorf("%+v: %d, %v", filter, n, err)
		}
	}

	groups, err := f.op.Letters().Summary(t.Context(), admin.DeadFilter{Collection: mongodb.Namespace(f.b)})
	if err != nil || len(groups) != 1 || groups[0].Count != 2 || groups[0].Class != "malformed" {
		t.Errorf("%+v, %v", groups, err)
	}

	for name, filter := range map[string]admin.DeadFilter{
		"a class": {Class: "malfored"}, "a source": {Source: "me"}, "a requeue status": {RequeueStatus: "no"}, "a window": {From: time.Now(), To: time.Now().Add(-time.Hour)},
		"an id": {IDs: []string{""}}, "a collection": {Collection: "a.b"},
	} {
		if _, err := f.op.Letters().Count(t.Context(), filter); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	if _, err := (admin.Operator{State: f.state, Watcher: "nobody"}).Letters().Count(t.Context(), admin.DeadFilter{}); err == nil || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("an unknown watcher: %v", err)
	}
}

func TestDeadShowHidesThePayload(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	f.moveToDead(f.a, record.RecordRejected, append(letterOf("x", planted), bson.E{Key: "secretfield", Value: planted}), again)
	f.moveToDead(f.a, record.RecordRejected, letterOf("x", planted))
	f.moveToDead(f.b, record.Malformed, letterOf("y", planted))
	f.moveToDead(f.a, record.Malformed, letterOf("y", planted))
	ref := admin.DeadRef{ID: "x", Delivery: -1}
	l, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload)
	if err != nil || l.Delivery != 1 || strings.Contains(string(l.Envelope), planted) || !strings.Contains(string(l.Envelope), `"type":"OrderPlaced"`) || !strings.Contains(string(l.Envelope), `"hidden":true,"type":"string","bytes":7`) {
		t.Errorf("%+v %s, %v", l, l.Envelope, err)
	}
	if l, err := f.op.Letters().Show(t.Context(), ref, admin.WithPayload); err != nil || strings.Count(string(l.Envelope), planted) != 2 {
		t.Errorf("with its payload: %s, %v", l.Envelope, err)
	}

	ref.Delivery = 0
	if l, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload); err != nil || l.Delivery != 0 || len(l.Attempts) != 1 || l.Reason != "rejected (87)" {
		t.Errorf("%+v, %v", l, err)
	}
	if _, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: "y", Delivery: -1}, admin.WithoutPayload); err == nil || !strings.Contains(err.Error(), "name one of them") {
		t.Errorf("an id of two collections: %v", err)
	}
	if _, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: "y", Delivery: -1, Collection: mongodb.Namespace(f.b)}, admin.WithoutPayload); err != nil {
		t.Error(err)
	}
	if _, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: "z", Delivery: -1}, admin.WithoutPayload); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("showing an unknown letter: %v, want not found", err)
	}
}

// An id may have several letters. Each of them has an id of its own, by which every action finds it.
func TestLettersOfOneIDHaveTheirOwnIDs(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	at := func(pos string) func(*letters.Letter) { return func(l *letters.Letter) { l.Pos = pos } }
	first := f.moveToDead(f.a, record.Malformed, letterOf("order-7", "first"), at("8201"))
	second := f.moveToDead(f.a, record.Malformed, letterOf("order-7", "second"), at("8202"))
	f.moveToDead(f.a, record.Malformed, letterOf("order-7", "second"), at("8202"), func(l *letters.Letter) { l.Topic = "audit" })

	_, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: "order-7", Delivery: -1}, admin.WithoutPayload)
	if err == nil || !strings.Contains(err.Error(), first) || !strings.Contains(err.Error(), second) || !strings.Contains(err.Error(), `"audit"`) {
		t.Errorf("an id with three letters: %v, want the ids of the letters", err)
	}
	l, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: second, Delivery: -1}, admin.WithPayload)
	if err != nil || l.Letter != second || l.ID != "order-7" || !strings.Contains(string(l.Envelope), "second") {
		t.Errorf("by the id of the letter: %+v %s, %v", l, l.Envelope, err)
	}
	page, err := f.op.Letters().List(t.Context(), admin.DeadFilter{IDs: []string{first, "nobody"}}, 0, "")
	if err != nil || page.Total != 1 || page.Items[0].Letter != first {
		t.Errorf("list by the id of the letter: %+v, %v", page, err)
	}

	edited, err := f.op.Letters().Edit(t.Context(), admin.DeadRef{ID: first, Delivery: -1}, admin.DeadEdit{Fields: map[string]string{"topic": "t"}}, admin.DeadOptions{})
	if err != nil || edited.Letter != first || edited.ID != "order-7" || edited.Delivery != 1 {
		t.Errorf("edit: %+v, %v", edited, err)
	}
	out, err := f.op.Letters().Requeue(t.Context(), admin.DeadFilter{IDs: []string{first, second}}, admin.DeadOptions{}, nil)
	if err != nil || out.Requeued != 1 {
		t.Errorf("requeue: %+v, %v", out, err)
	}
	if n := f.countEnvelopes(f.state.Collection("waiting")); n != 2 {
		t.Errorf("%d envelopes wait, want both events", n)
	}
	gone, err := f.op.Letters().Discard(t.Context(), admin.DeadFilter{IDs: []string{first}}, admin.ForReal, nil)
	if n, err2 := f.op.Letters().Count(t.Context(), admin.DeadFilter{}); err != nil || err2 != nil || gone.Discarded != 1 || n != 2 {
		t.Errorf("discard: %+v, %v; %d letters are left, %v", gone, err, n, err2)
	}
	l, err = f.op.Letters().Show(t.Context(), admin.DeadRef{ID: first, Delivery: -1}, admin.WithoutPayload)
	if !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("a discarded letter: %+v, %v", l, err)
	}
}

func TestDeadRequeueIsCountedAndLogged(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	for i := range 5 {
		f.moveToDead([]*mongo.Collection{f.a, f.b}[i%2], record.RecordRejected, letterOf(fmt.Sprint("id", i), planted))
	}

	f.moveToDead(f.b, record.Malformed, bson.D{{Key: "_id", Value: "bare"}})
	if _, err := f.op.Letters().Requeue(t.Context(), admin.DeadFilter{}, admin.DeadOptions{}, nil); !errors.Is(err, admin.ErrNoCondition) {
		t.Errorf("an empty filter: %v", err)
	}
	if _, err := f.op.Letters().Requeue(t.Context(), admin.DeadFilter{All: true, RequeueStatus: "true"}, admin.DeadOptions{}, nil); err == nil {
		t.Error("letters that were requeued already were taken")
	}

	var steps []int64
	for _, dry := range []bool{true, false} {
		steps = nil
		got, err := f.op.Letters().Requeue(t.Context(), admin.DeadFilter{All: true}, admin.DeadOptions{DryRun: dry}, func(n int64) { steps = append(steps, n) })
		if err != nil || got.Matched != 6 || got.Requeued != 5 || got.Rejected != 1 || len(got.Why) != 1 || got.Why[0].ID != "bare" || got.DryRun != dry {
			t.Fatalf("dry %v: %+v, %v", dry, got, err)
		}
		if n := f.countEnvelopes(f.state.Collection("waiting")); dry && n != 0 || !dry && n != 5 {
			t.Errorf("dry %v: %d envelopes", dry, n)
		}
		if dry && len(f.readLog()) != 0 {
			t.Error("a dry run is in the log")
		}
	}
	if len(steps) != 1 || steps[0] != 6 {
		t.Errorf("progress %v", steps)
	}

	log := f.readLog()
	if len(log) != 1 || log[0].Kind != "dead_requeued" || log[0].Fields.Lookup("requeued").AsInt64() != 5 || log[0].Fields.Lookup("rejected").AsInt64() != 1 ||
		!log[0].Fields.Lookup("complete").Boolean() || !log[0].Fields.Lookup("query", "all").Boolean() {
		t.Fatalf("%+v", log)
	}

	l, err := f.op.Letters().Show(t.Context(), admin.DeadRef{ID: "id0", Delivery: -1}, admin.WithoutPayload)
	if err != nil || l.Requeued == nil || l.Requeued.Actor != "ann" || l.Requeued.Run != log[0].Fields.Lookup("run").StringValue() {
		t.Errorf("%+v, %v", l, err)
	}
	if got, err := f.op.Letters().Requeue(t.Context(), admin.DeadFilter{All: true, Class: "record_rejected"}, admin.DeadOptions{}, nil); err != nil || got.Matched != 0 || len(f.readLog()) != 1 {
		t.Errorf("again: %+v, %v", got, err)
	}
}

func TestAnActionThatIsCalledOffIsLoggedAsFarAsItCame(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	// The parts of a requeue are bounded by their bytes.
	large := append(letterOf("1", planted), bson.E{Key: "large", Value: make([]byte, mongodb.MaxBytes)})
	f.moveToDead(f.a, record.RecordRejected, large)
	f.moveToDead(f.b, record.RecordRejected, letterOf("2", planted), func(l *letters.Letter) { l.Pos = "8266" })
	ctx, cancel := context.WithCancel(t.Context())
	got, err := f.op.Letters().Requeue(ctx, admin.DeadFilter{All: true}, admin.DeadOptions{}, func(int64) { cancel() })
	if !errors.Is(err, context.Canceled) || got.Requeued != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	if log := f.readLog(); len(log) != 1 || log[0].Fields.Lookup("requeued").AsInt64() != 1 || log[0].Fields.Lookup("complete").Boolean() {
		t.Errorf("%+v", log)
	}
}

func TestASlowServerLeavesNoGapInTheLog(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	f.moveToDead(f.a, record.RecordRejected, letterOf("1", planted))
	app := stacktest.Name(t)
	op := f.op
	op.State = f.state.On(stacktest.Client(t, options.Client().SetAppName(app)))
	stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"update"}},
		{Key: "namespace", Value: f.state.Namespace("audit")},
		{Key: "blockConnection", Value: true},
		{Key: "blockTimeMS", Value: 5500},
	})

	if got, err := op.Letters().Requeue(t.Context(), admin.DeadFilter{All: true}, admin.DeadOptions{}, nil); err != nil || got.Requeued != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	if log := f.readLog(); len(log) != 1 {
		t.Errorf("%+v", log)
	}
}

func TestDeadEditKeepsOrMakesTheTypeOfThePayload(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	for i, c := range []struct {
		old  any
		edit admin.DeadEdit
		want any // nil: rejected
	}{
		{bson.Binary{Subtype: 0x80, Data: []byte(planted)}, admin.DeadEdit{Payload: []byte{0xff}}, bson.Binary{Subtype: 0x80, Data: []byte{0xff}}},
		{planted, admin.DeadEdit{Payload: []byte("new")}, "new"},
		{planted, admin.DeadEdit{Payload: []byte{0xff}}, nil},
		{planted, admin.DeadEdit{Payload: []byte{0xff}, PayloadAs: "binary"}, bson.Binary{Data: []byte{0xff}}},
		{bson.D{{Key: "a", Value: planted}}, admin.DeadEdit{Payload: []byte(`{"z":1,"a":[true]}`)}, bson.D{{Key: "z", Value: int32(1)}, {Key: "a", Value: bson.A{true}}}},
		{bson.A{planted}, admin.DeadEdit{Payload: []byte(`[2]`)}, bson.A{int32(2)}},
		{bson.A{planted}, admin.DeadEdit{Payload: []byte(`{},"x":{}`)}, nil},
		{bson.A{planted}, admin.DeadEdit{Payload: []byte(`7`)}, nil},
		{nil, admin.DeadEdit{Payload: []byte("x")}, nil},
		{nil, admin.DeadEdit{Payload: []byte("x"), PayloadAs: "string"}, "x"},
		{planted, admin.DeadEdit{PayloadAs: "null"}, bson.Null{}},
		{planted, admin.DeadEdit{PayloadAs: "text"}, nil},
		{planted, admin.DeadEdit{Version: 1, Payload: []byte("new")}, nil},
		{planted, admin.DeadEdit{Fields: map[string]string{"partition": "x"}}, nil},
		{planted, admin.DeadEdit{Fields: map[string]string{"partition": "3", "expiresAt": "2099-01-01T00:00:00Z", "topic": "t"}, Headers: [][2]string{{"h", "1"}, {"h", "2"}}}, planted},
	} {
		id := fmt.Sprint("id", i)
		f.moveToDead(f.a, record.RecordRejected, letterOf(id, c.old))
		got, err := f.op.Letters().Edit(t.Context(), admin.DeadRef{ID: id, Delivery: -1}, c.edit, admin.DeadOptions{})
		if c.want == nil {
			if err == nil || strings.Contains(err.Error(), planted) {
				t.Errorf("%d: %+v, %v", i, got, err)
			}
			continue
		}
		if err != nil || got.Delivery != 1 {
			t.Errorf("%d: %+v, %v", i, got, err)
			continue
		}
		stored, err := f.state.Collection("waiting").FindOne(t.Context(), bson.D{{Key: "id", Value: id}}).Raw()
		if err != nil {
			t.Fatal(err)
		}
		raw := stored.Lookup("envelope").Document()
		want, err := bson.Marshal(bson.D{{Key: "p", Value: c.want}})
		if err != nil {
			t.Fatal(err)
		}
		if !raw.Lookup("payload").Equal(bson.Raw(want).Lookup("p")) {
			t.Errorf("%d: %s", i, raw)
		}
	}

	log := f.readLog()
	if len(log) != 8 || log[0].Kind != "dead_edited" || log[0].Fields.Lookup("edited").String() != `["expiresAt","headers","partition","topic"]` {
		t.Errorf("%d entries: %+v", len(log), log[0])
	}
}

func TestACollectionThatWasMadeAgainIsListedOnce(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	again := mongodb.Namespace(f.a)
	if _, err := outboxes.NewRegistry(f.state.Collection("collections")).Register(t.Context(), [16]byte{99}, again, "orders", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}
	f.moveToDead(f.a, record.Malformed, letterOf("dead1", planted))

	names, err := f.op.Collections(t.Context(), "")
	if err != nil || !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) || !slices.Contains(names, again) {
		t.Errorf("Collections() = %q, %v, want each name once", names, err)
	}
	if n, err := f.op.Letters().Count(t.Context(), admin.DeadFilter{}); err != nil || n != 1 {
		t.Errorf("Count() = %d, %v, want 1 letter", n, err)
	}
	f.wait(f.newWaiting(f.a, "w", "retry", "k", 30, "orders"))
	groups, err := f.op.Waiting().Summary(t.Context(), "")
	if err != nil || len(groups) != 1 || groups[0].Count != 1 {
		t.Errorf("Summary() = %+v, %v, want one group with 1 envelope", groups, err)
	}
}

func TestDeadDiscard(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	for i := range 4 {
		f.moveToDead([]*mongo.Collection{f.a, f.b}[i%2], []record.Class{record.Malformed, record.Expired}[i/3], letterOf(fmt.Sprint("id", i), planted))
	}
	if _, err := f.op.Letters().Discard(t.Context(), admin.DeadFilter{}, admin.ForReal, nil); !errors.Is(err, admin.ErrNoCondition) {
		t.Errorf("an empty filter: %v", err)
	}

	filter := admin.DeadFilter{Class: "malformed"}
	if got, err := f.op.Letters().Discard(t.Context(), filter, admin.DryRun, nil); err != nil || got.Matched != 3 || got.Discarded != 0 || len(f.readLog()) != 0 {
		t.Errorf("dry run: %+v, %v", got, err)
	}
	if got, err := f.op.Letters().Discard(t.Context(), filter, admin.ForReal, nil); err != nil || got.Matched != 3 || got.Discarded != 3 {
		t.Errorf("%+v, %v", got, err)
	}
	if n, err := f.op.Letters().Count(t.Context(), admin.DeadFilter{}); err != nil || n != 1 {
		t.Errorf("%d are left, %v", n, err)
	}
	if log := f.readLog(); len(log) != 2 || log[1].Kind != "dead_discarding" || log[1].Fields.Lookup("matched").AsInt64() != 3 || log[0].Kind != "dead_discarded" || log[0].Fields.Lookup("discarded").AsInt64() != 3 {
		t.Errorf("%+v", log)
	}
}

// An edit that was made from one delivery does not change a later delivery of the same event, which an edit of another person may have made.
func TestAnEditOfADeliveryIsNotAppliedToTheNext(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	f.moveToDead(f.a, record.NotAllowed, letterOf("d1", "first"))
	desk, err := deadletter.New(f.a.Database())
	if err != nil {
		t.Fatal(err)
	}
	diesAgain := map[string]func(){
		"d1": func() { f.moveToDead(f.a, record.NotAllowed, letterOf("d1", "of bob"), again) },
		"m1": func() {
			letter := &deadletter.Letter{ID: deadletter.ID{Group: "g", Handler: "h", Topic: "orders", Message: "m1", Delivery: 1}, Class: deadletter.ClassHandler}
			if _, err := desk.Put(t.Context(), module.Key{}, letter, func(context.Context, string) error { return nil }); err != nil {
				t.Fatal(err)
			}
		},
	}
	f.giveUp(f.a, deadletter.DefaultCollection, "h", "m1")

	for id, die := range diesAgain {
		ref := admin.DeadRef{ID: id, Delivery: -1}
		shown, err := f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload)
		if err != nil {
			t.Fatal(err)
		}
		if out, err := f.op.Letters().Requeue(t.Context(), admin.DeadFilter{IDs: []string{id}}, admin.DeadOptions{}, nil); out.Requeued != 1 || err != nil {
			t.Fatalf("%+v, %v", out, err)
		}
		die()

		edit := admin.DeadEdit{Version: shown.Version, Payload: []byte("of ann")}
		if _, err := f.op.Letters().Edit(t.Context(), ref, edit, admin.DeadOptions{DryRun: true}); !errors.Is(err, requeues.ErrOtherVersion) {
			t.Errorf("%s: %v, want %v", id, err, requeues.ErrOtherVersion)
		}
		if shown, err = f.op.Letters().Show(t.Context(), ref, admin.WithoutPayload); err != nil || shown.Delivery != 1 {
			t.Fatalf("%+v, %v", shown, err)
		}
		edit.Version = shown.Version
		if _, err := f.op.Letters().Edit(t.Context(), ref, edit, admin.DeadOptions{DryRun: true}); err != nil {
			t.Errorf("%s: an edit of the next delivery: %v", id, err)
		}
	}
}

// An edit replaces all headers as texts. A header that it does not change keeps its value: null stays null, and a string stays a string.
func TestAnEditKeepsHeadersThatItDoesNotChange(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	header := func(name string, value any) bson.D { return bson.D{{Key: "k", Value: name}, {Key: "v", Value: value}} }
	edit := admin.DeadEdit{Headers: [][2]string{{"empty", ""}, {"plain", "text"}, {"changed", "new"}}}

	stored := bson.A{header("empty", nil), header("plain", "text"), header("changed", "old")}
	f.moveToDead(f.a, record.RecordRejected, append(letterOf("d1", "p"), bson.E{Key: "headers", Value: stored}))
	if _, err := f.op.Letters().Edit(t.Context(), admin.DeadRef{ID: "d1", Delivery: -1}, edit, admin.DeadOptions{}); err != nil {
		t.Fatal(err)
	}
	raw, err := f.state.Collection("waiting").FindOne(t.Context(), bson.D{{Key: "id", Value: "d1"}}).Raw()
	if err != nil {
		t.Fatal(err)
	}
	want, err := bson.Marshal(bson.D{{Key: "l", Value: bson.A{header("empty", nil), header("plain", "text"), header("changed", bson.Binary{Data: []byte("new")})}}})
	if err != nil {
		t.Fatal(err)
	}
	if got := raw.Lookup("envelope", "headers"); !got.Equal(bson.Raw(want).Lookup("l")) {
		t.Errorf("headers of the envelope: %s", got)
	}

	desk, err := deadletter.New(f.a.Database())
	if err != nil {
		t.Fatal(err)
	}
	letter := &deadletter.Letter{
		ID: deadletter.ID{Group: "g", Handler: "h", Topic: "orders", Message: "m1"}, Class: deadletter.ClassHandler, Key: []byte("7"), Value: []byte("p"),
		Headers: []event.Header{{Key: "empty"}, {Key: "plain", Value: []byte("text")}, {Key: "changed", Value: []byte("old")}},
	}
	if _, err := desk.Put(t.Context(), module.Key{}, letter, func(context.Context, string) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if _, err := f.op.Letters().Edit(t.Context(), admin.DeadRef{ID: "m1", Delivery: -1}, edit, admin.DeadOptions{}); err != nil {
		t.Fatal(err)
	}
	message, err := setaside.New(f.a.Database(), setaside.DefaultCollection).First(t.Context(), setaside.Place{Handler: "g/h", Topic: "orders"}, setaside.KeyQueue([]byte("7")))
	if err != nil || message == nil {
		t.Fatalf("the message that waits: %+v, %v", message, err)
	}
	// The requeue adds other headers.
	values := map[string][]byte{}
	for _, header := range message.Headers {
		values[header.Key] = header.Value
	}
	if empty, isThere := values["empty"]; !isThere || empty != nil || string(values["plain"]) != "text" || string(values["changed"]) != "new" {
		t.Errorf("headers of the message: %+v", message.Headers)
	}
}
