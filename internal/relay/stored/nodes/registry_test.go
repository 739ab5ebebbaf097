package nodes

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

func TestN06_NodesListEachOther(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("nodes")
	n := NewNodes(coll)
	if _, err := n.Heartbeat(t.Context(), Sign{Node: "$a", Address: "10.0.0.1:80", Watchers: []string{"orders"}, KafkaReachable: false, SinceAck: -1}); err != nil {
		t.Fatal(err)
	}
	if ok, err := n.AnotherReachesKafka(t.Context(), "$a", time.Minute); err != nil || ok {
		t.Errorf("alone, another reaches Kafka: %v, %v", ok, err)
	}
	if _, err := n.Heartbeat(t.Context(), Sign{Node: "b", KafkaReachable: true, SinceAck: 3 * time.Second, Facts: Facts{Tasks: []string{"relay"}}}); err != nil {
		t.Fatal(err)
	}
	if ok, err := n.AnotherReachesKafka(t.Context(), "$a", time.Minute); err != nil || !ok {
		t.Errorf("b reaches Kafka: %v, %v", ok, err)
	}
	if ok, err := n.AnotherReachesKafka(t.Context(), "b", time.Minute); err != nil || ok {
		t.Errorf("another node than b reaches Kafka: %v, %v, want none", ok, err)
	}

	all, err := n.List(t.Context())
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}

	for _, x := range all {
		if x.Age() < 0 || x.Age() > time.Minute || !x.Alive(time.Minute) {
			t.Errorf("%s is %v old", x.Node, x.Age())
		}
		if ack := x.LastAck; x.Node == "b" && (ack == nil || x.SeenAt.Sub(*ack) != 3*time.Second) || x.Node == "$a" && ack != nil {
			t.Errorf("last ack of %s: %v, seen at %v", x.Node, ack, x.SeenAt)
		}
	}

	// b was seen last an hour ago.
	if _, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "b"}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "seenAt", Value: bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", int64(3_600_000)}}}},
	}}}}); err != nil {
		t.Fatal(err)
	}
	if ok, err := n.AnotherReachesKafka(t.Context(), "$a", time.Minute); err != nil || ok {
		t.Errorf("a stale node counts: %v, %v", ok, err)
	}

	for node, want := range map[string]bool{"$a": true, "b": false, "nobody": false} {
		if ok, err := n.Alive(t.Context(), node, time.Minute); err != nil || ok != want {
			t.Errorf("%s alive: %v, %v", node, ok, err)
		}
	}
	if gone, err := n.Forget(t.Context(), 10*time.Minute); err != nil || gone != 1 {
		t.Errorf("%d stale nodes were removed, %v", gone, err)
	}
	if err := n.Leave(t.Context(), "$a"); err != nil {
		t.Error(err)
	}
	if all, _ := n.List(t.Context()); len(all) != 0 {
		t.Errorf("left: %+v", all)
	}

	// A node that runs no watcher takes none over.
	for tasks, want := range map[string]bool{"admin": false, "relay": true} {
		if _, err := n.Heartbeat(t.Context(), Sign{Node: "c", KafkaReachable: true, Facts: Facts{Tasks: []string{tasks}}}); err != nil {
			t.Fatal(err)
		}
		if ok, err := n.AnotherReachesKafka(t.Context(), "$a", time.Minute); err != nil || ok != want {
			t.Errorf("with the task %s: %v, %v", tasks, ok, err)
		}
	}
}

func TestEventsAreKeptInOrderAndTrimmed(t *testing.T) {
	t.Parallel()
	coll := newDatabase(t).Collection("audit")
	e := NewAuditLog(coll, "orders", "a")
	if err := mongodb.CreateIndexes(t.Context(), coll, []mongodb.Index{{Name: "at_1", Keys: mongodb.Ascending("at")}}); err != nil {
		t.Fatal(err)
	}

	for i := range 12 {
		if err := e.Append(t.Context(), TookOver, bson.D{{Key: "epoch", Value: i}, {Key: "$odd", Value: "$now"}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := e.Trim(t.Context(), 5); err != nil {
		t.Fatal(err)
	}

	got, err := e.Latest(t.Context(), 100)
	if err != nil || len(got) != 5 {
		t.Fatalf("%d events, %v", len(got), err)
	}

	for i, ev := range got {
		if n := ev.Fields.Lookup("epoch").AsInt64(); n != int64(11-i) || ev.Kind != TookOver || ev.Watcher != "orders" || ev.At.IsZero() {
			t.Errorf("event %d: %+v", i, ev)
		}
	}
	if err := e.Append(t.Context(), Halted, nil); err != nil {
		t.Error(err)
	}
}
