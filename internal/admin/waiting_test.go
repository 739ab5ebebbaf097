package admin_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

func newWaiting(id, state string, key any, pos uint32, topics ...string) bson.D {
	return append(letterOf(id, planted), bson.E{Key: "key", Value: key}, bson.E{Key: "state", Value: state}, bson.E{Key: "pending", Value: topics},
		bson.E{Key: "pos", Value: outboxes.PosAt(bson.Timestamp{T: pos})}, bson.E{Key: "origin", Value: "stream"}, bson.E{Key: "attempts", Value: int32(2)})
}

func (f *office) insert(coll *mongo.Collection, docs ...bson.D) {
	f.t.Helper()
	if _, err := coll.InsertMany(f.t.Context(), docs); err != nil {
		f.t.Fatal(err)
	}
}

func TestWaitingEnvelopesAreCounted(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	if got, err := f.op.Waiting().Summary(t.Context(), ""); err != nil || len(got) != 0 {
		t.Errorf("of nothing: %+v, %v", got, err)
	}

	f.insert(f.a, newWaiting("p1", "parked", "k", 20, "orders", "audit"), newWaiting("p2", "parked", "k", 10, "orders"), newWaiting("r", "retry", "q", 30, "orders"))
	due := time.UnixMilli(4_000_000_000_000).UTC()
	for i, coll := range []*mongo.Collection{f.a, f.b, f.b} {
		f.moveToDead(coll, record.Malformed, letterOf(fmt.Sprint("dead", i), planted))
		f.insert(coll, append(letterOf(fmt.Sprint("due", i), planted), bson.E{Key: "dueAt", Value: due.Add(time.Duration(i) * time.Hour)}),
			letterOf(fmt.Sprint("healthy", i), planted))
	}

	got, err := f.op.Waiting().Summary(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}

	var rows []string
	for _, g := range got {
		at := "-"
		if g.Oldest != nil {
			at = fmt.Sprint(g.Oldest.Unix())
		}
		rows = append(rows, fmt.Sprintf("%d %s %s %d %s", slices.Index([]string{mongodb.Namespace(f.a), mongodb.Namespace(f.b)}, g.Collection), g.State, g.Topic, g.Count, at))
	}

	slices.Sort(rows)
	want := []string{
		"0 dead  1 -", "0 parked audit 1 20", "0 parked orders 2 10", "0 retry orders 1 30", "0 scheduled  1 4000000000",
		"1 dead  2 -", "1 scheduled  2 4000003600",
	}
	if !slices.Equal(rows, want) {
		t.Errorf("counted %q, want %q", rows, want)
	}
	if got, err := f.op.Waiting().Summary(t.Context(), mongodb.Namespace(f.b)); err != nil || len(got) != 2 {
		t.Errorf("of one collection: %+v, %v", got, err)
	}
}

func TestWaitingEnvelopesAreListedInTheirOrder(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	f.insert(f.a, newWaiting("k3", "blocked", "k", 30, "orders"), newWaiting("k1", "parked", "k", 10, "orders", "audit"), newWaiting("k2", "blocked", "k", 20, "audit"))
	many := []bson.D{newWaiting("n1", "retry", int32(42), 5, "orders")}
	for i := range 1200 { // more than a page
		many = append(many, newWaiting(fmt.Sprintf("x%04d", i), "parked", "x", uint32(100+i), "late"))
	}

	f.insert(f.b, many...)
	for name, c := range map[string]struct {
		admin.WaitingFilter
		limit int
		want  []string
	}{
		"a key":        {admin.WaitingFilter{Key: "k"}, 100, []string{"k1", "k2", "k3"}},
		"a number":     {admin.WaitingFilter{Key: "42"}, 100, []string{"n1"}},
		"a topic":      {admin.WaitingFilter{Topic: "audit"}, 100, []string{"k1", "k2"}},
		"a state":      {admin.WaitingFilter{State: "blocked"}, 100, []string{"k2", "k3"}},
		"a collection": {admin.WaitingFilter{Collection: mongodb.Namespace(f.a), Topic: "orders"}, 100, []string{"k1", "k3"}},
		"a limit":      {admin.WaitingFilter{Topic: "late"}, 2, []string{"x0000", "x0001"}},
		"no such":      {admin.WaitingFilter{Key: "nobody"}, 100, nil},
	} {
		list, err := f.op.Waiting().List(t.Context(), c.WaitingFilter, c.limit)
		var ids []string
		for _, e := range list {
			ids = append(ids, e.ID)
		}
		if err != nil || !slices.Equal(ids, c.want) {
			t.Errorf("%s: %v, %v; want %v", name, ids, err, c.want)
		}
	}

	list, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{}, admin.MaxWaiting)
	if err != nil || len(list) != 1204 {
		t.Errorf("%d of all, %v", len(list), err)
	}

	one, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{Key: "k"}, 1)
	if err != nil || len(one) != 1 || one[0].State != "parked" || !slices.Equal(one[0].Topics, []string{"orders", "audit"}) || one[0].Attempts != 2 || one[0].Origin != "stream" {
		t.Errorf("%+v, %v", one, err)
	}

	for _, f2 := range []admin.WaitingFilter{{State: "dead"}, {Collection: "a.b"}} {
		if _, err := f.op.Waiting().List(t.Context(), f2, 1); err == nil {
			t.Errorf("%+v was taken", f2)
		}
	}
	if _, err := f.op.Waiting().List(t.Context(), admin.WaitingFilter{}, 0); err == nil {
		t.Error("a list of none was taken")
	}
}
