package main

import (
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// A missing topic is created with the numbers of the configuration or of the flags, once, and the audit log has it.
func TestATopicIsCreated(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	name := stacktest.Name(t)
	d.env = append(d.env, "OUTRELAY_KAFKA_BROKERS="+strings.Join(stacktest.Brokers(t), ","), "OUTRELAY_TOPICS_CREATE_PARTITIONS=2")

	command := "kafka-topics.sh --bootstrap-server " + strings.Join(stacktest.Brokers(t), ",") + " --create --topic " + name + " --partitions 2 --replication-factor 1"
	expectTexts(t, d.runCommand(nil, exitOK, "topics", "create", name, "--replication", "1", "--dry-run"), "would create topic "+name+" with 2 partitions and replication factor 1", command)
	expectTexts(t, d.runCommand(nil, exitConfig, "topics", "create", name), "pass --yes")
	var created admin.TopicCreated
	d.runCommand(&created, exitOK, "topics", "create", name, "--yes", "--partitions", "3")
	if created.Topic != name || created.Partitions != 3 || created.Replication != 0 || created.DryRun {
		t.Errorf("unexpected result %+v", created)
	}
	transport := &kafka.Transport{}
	defer transport.CloseIdleConnections()
	client := &kafka.Client{Addr: kafka.TCP(stacktest.Brokers(t)...), Transport: transport}
	response, err := client.Metadata(t.Context(), &kafka.MetadataRequest{Topics: []string{name}})
	if err != nil || len(response.Topics) != 1 || len(response.Topics[0].Partitions) != 3 {
		t.Errorf("Kafka has %+v, %v", response, err)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "audit", "--kind", "topic_created"), name, "topic_created")

	for _, c := range []struct {
		want string
		env  []string
		args []string
	}{
		{"exists already", nil, []string{name}},
		{"may contain only letters", nil, []string{"a/b"}},
		{"is internal to Kafka", nil, []string{"__consumer_offsets"}},
		{"matches nothing in topics.allow", []string{"OUTRELAY_TOPICS_ALLOW=orders.*"}, []string{"payments"}},
		{"numbers above 0", nil, []string{"t", "--partitions", "-1"}},
		{"fewer brokers", nil, []string{name + "-2", "--replication", "99"}},
	} {
		code, out, errOut := runCommand(t, append(d.env, c.env...), append([]string{"topics", "create", "--yes"}, c.args...)...)
		if code != exitConfig || !strings.Contains(errOut, c.want) {
			t.Errorf("%v: exit code %d, want %q in %s%s", c.args, code, c.want, out, errOut)
		}
	}
}

// A topic that exists with fewer partitions than the owner needs gets exactly the needed number, and other topics stay as they are.
func TestATooSmallTopicIsExtended(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	name := stacktest.Topic(t, 1)
	brokers := strings.Join(stacktest.Brokers(t), ",")
	d.env = append(d.env, "OUTRELAY_KAFKA_BROKERS="+brokers)
	unwritable := bson.D{{Key: "topic", Value: name}, {Key: "kind", Value: "too_small"}, {Key: "partitions", Value: 3}, {Key: "since", Value: time.Now()}, {Key: "count", Value: 1}}
	set := bson.D{{Key: "$set", Value: bson.D{{Key: "stats.unwritable", Value: bson.A{unwritable}}}}}
	if _, err := d.state.Collection("watchers").UpdateMany(t.Context(), bson.D{}, set); err != nil {
		t.Fatal(err)
	}

	if code, _, errOut := runCommand(t, d.env, "topics", "create", name, "--partitions", "2", "--yes"); code != exitConfig || !strings.Contains(errOut, "needs at least 3 partitions") {
		t.Errorf("too few: exit code %d, %s", code, errOut)
	}
	command := "kafka-topics.sh --bootstrap-server " + brokers + " --alter --topic " + name + " --partitions 3"
	expectTexts(t, d.runCommand(nil, exitOK, "topics", "create", name, "--dry-run"), "would add partitions to topic "+name+", up to 3 partitions", command)
	expectTexts(t, d.runCommand(nil, exitOK, "topics", "create", name, "--partitions", "3", "--yes"), "added partitions to topic "+name+", up to 3 partitions")
	expectTexts(t, d.runCommand(nil, exitOK, "audit", "--kind", "topic_extended"), name)
	if code, _, errOut := runCommand(t, d.env, "topics", "create", name, "--yes"); code != exitConfig || !strings.Contains(errOut, "exists already") {
		t.Errorf("a second time: exit code %d, %s", code, errOut)
	}
}

// A topic that was deleted gets the partitions to which the relay wrote, also while no event waits for it.
func TestADeletedTopicGetsItsPartitionsAgain(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	name := stacktest.Name(t)
	d.env = append(d.env, "OUTRELAY_KAFKA_BROKERS="+strings.Join(stacktest.Brokers(t), ","))
	offsets := []lease.TopicOffsets{
		{Topic: "other", Offsets: []int64{1, 1, 1, 1, 1, 1, 1, 1, 1}},
		{Topic: name, Offsets: []int64{7, -1, 0, 4}},
	}
	if _, err := d.state.Collection("watchers").UpdateMany(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "offsets", Value: offsets}}}}); err != nil {
		t.Fatal(err)
	}

	if code, _, errOut := runCommand(t, d.env, "topics", "create", name, "--partitions", "2", "--yes"); code != exitConfig || !strings.Contains(errOut, "wrote to 4 partitions") {
		t.Errorf("too few: exit code %d, %s", code, errOut)
	}
	var created admin.TopicCreated
	d.runCommand(&created, exitOK, "topics", "create", name, "--yes")
	if created.Partitions != 4 {
		t.Errorf("got %+v, want 4 partitions", created)
	}
}

func TestTopicsCommands(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	expectTexts(t, d.runCommand(nil, exitOK, "topics", "recent"), "no delivered event is known")

	now := time.Now()
	if err := nodes.NewHistory(d.state.Collection("history")).SaveActivity(t.Context(), "default/0of1", activity.Report{
		At: now, Others: activity.Others{Topics: 3, Rate: 2},
		Topics: []activity.Topic{{Topic: "orders", Rate: 12.34, Bytes: 2048, Records: 740, P50MS: 1.5, P99MS: 2500, LastAt: now, Partition: 2, Offset: 41}, {Topic: "quiet", LastAt: now}},
		Events: []activity.Event{
			{ID: "e-2", Type: "OrderPlaced", Key: "customer-7", Topic: "orders", Partition: 2, Offset: 41, CommittedAt: now.Add(-3 * time.Millisecond), AckedAt: now},
			{ID: "e-1", Topic: "audit", AckedAt: now},
		},
	}); err != nil {
		t.Fatal(err)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "topics"), "orders  12.3/s  2.0 KiB/s  1.5 ms  2.5 s", "2@41", "3 more topics, 2.0/s")
	var list admin.TopicList
	d.runCommand(&list, exitOK, "topics")
	if len(list.Topics) != 2 || list.Topics[0].LastOffset != 41 {
		t.Errorf("%+v", list)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "topics", "recent"), "e-2", "customer-7", "2@41", " 3 ms", "e-1")
	if text := d.runCommand(nil, exitOK, "topics", "recent", "--topic", "audit"); strings.Contains(text, "e-2") || !strings.Contains(text, "e-1") {
		t.Errorf("only one topic: %s", text)
	}
}
