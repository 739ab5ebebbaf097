package consumer_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/setaside"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
)

// `go test ./pkg/consumer -run RandomFaults -fault.long 40 -v`; a step takes a second or two. The log has the seed, and
// -fault.seed repeats its faults, not the order of the goroutines.
var (
	randomSteps = flag.Int("fault.long", 0, "steps of TestRandomFaultsLoseNothing: members come and go, and commands fail in each")
	randomSeed  = flag.Uint64("fault.seed", 0, "seed of TestRandomFaultsLoseNothing; 0: a new one")
)

// Members start and stop, handlers fail and MongoDB fails, at random. After the faults, each message has had its effect, in
// the order of its key, and no message waits.
func TestRandomFaultsLoseNothing(t *testing.T) {
	stacktest.OnlyWith(t, "each case takes a minute or more", "fault.long")
	for name, use := range map[string][]consumer.Option{"kafka-go": nil, "franz": {franz.Use()}} {
		for _, mode := range []consumer.Mode{consumer.Transactional, consumer.AtLeastOnce} {
			t.Run(name+"/"+mode.String(), func(t *testing.T) {
				seed := *randomSeed
				if seed == 0 {
					seed = rand.Uint64()
				}
				t.Logf("-fault.seed %d", seed)
				runRandomFaults(t, rand.New(rand.NewPCG(seed, 0)), append(use[:len(use):len(use)], consumer.WithMode(mode)))
			})
		}
	}
}

// commandFaults are the faults of MongoDB. A failed commit may have happened or not.
var commandFaults = []bson.D{
	{{Key: "failCommands", Value: bson.A{"insert", "update", "delete", "findAndModify"}}, {Key: "errorCode", Value: 112}, {Key: "errorLabels", Value: bson.A{"TransientTransactionError"}}},
	{{Key: "failCommands", Value: bson.A{"find", "aggregate", "insert", "update", "delete"}}, {Key: "closeConnection", Value: true}},
	{{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "closeConnection", Value: true}},
	{{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "errorCode", Value: 91}, {Key: "errorLabels", Value: bson.A{"RetryableWriteError"}}},
	{{Key: "failCommands", Value: bson.A{"commitTransaction"}}, {Key: "writeConcernError", Value: bson.D{{Key: "code", Value: 91}, {Key: "errmsg", Value: "as wanted"}}}, {Key: "errorLabels", Value: bson.A{"RetryableWriteError"}}},
}

const (
	randomPartitions = 4
	randomKeys       = 20
	randomEach       = 40 // messages of a step
)

// randomMember is a running member of the group.
type randomMember struct {
	*consumer.Consumer
	stop func()
}

func runRandomFaults(t *testing.T, random *rand.Rand, opts []consumer.Option) {
	app := stacktest.Name(t)
	k := newKit(t, randomPartitions, options.Client().SetAppName(app))
	opts = append(opts, consumer.WithRetry(soon), consumer.WithDrain(2*time.Second))
	effects := k.insertInto("effects")
	var calm atomic.Bool
	handle := func(ctx context.Context, m *consumer.Message) error {
		dice := rand.N(100)
		switch {
		case calm.Load():
		case dice < 4:
			return errWanted
		case dice < 6:
			return consumer.RetryIn(100*time.Millisecond, nil)
		case dice < 7:
			panic(errWanted)
		case dice < 9:
			<-time.After(300 * time.Millisecond)
		}
		err := effects(ctx, m)
		if dice == 99 && !calm.Load() {
			return errWanted
		}
		return err
	}

	var members []randomMember
	start := func() {
		c := k.newConsumer(opts...)
		addHandler(t, c, "counted", handle)
		members = append(members, randomMember{c, k.start(c)})
	}
	state := func() any { return k.describeGroup(members) }
	// A member lives until each has partitions, so that no join is left behind.
	settle := func() {
		t.Helper()
		stacktest.EventuallyIn(t, time.Minute, "each member to have partitions", func() bool {
			n := 0
			for _, m := range members {
				own := len(m.Status().Partitions)
				if own == 0 {
					return false
				}
				n += own
			}
			return n == randomPartitions
		}, state)
	}

	start()
	start()
	n := *randomSteps * randomEach
	for all := newMessages(randomKeys, n); len(all) > 0; all = all[randomEach:] {
		k.publish(all[:randomEach]...)
		off := func() {}
		if random.IntN(3) > 0 {
			off = stacktest.FailCommand(t, app, "alwaysOn", commandFaults[random.IntN(len(commandFaults))])
		}

		switch i := random.IntN(len(members)); {
		case random.IntN(2) == 0:
		case len(members) == 1 || len(members) < randomPartitions && random.IntN(2) == 0:
			start()
		default:
			members[i].stop()
			members = append(members[:i:i], members[i+1:]...)
		}

		<-time.After(time.Duration(200+random.IntN(800)) * time.Millisecond)
		off()
		settle()
	}

	calm.Store(true)
	stacktest.EventuallyIn(t, 4*time.Minute, "the end of all messages", func() bool {
		return k.countDocuments(setaside.DefaultCollection) == 0 && sumOffsets(k.readCommitted(randomPartitions)) == int64(n)
	}, state)
	k.checkOrder("effects", n, strings.HasSuffix(t.Name(), consumer.Transactional.String()))
	if got := k.countDocuments(deadletter.DefaultCollection); got > 0 {
		t.Errorf("%d dead letters", got)
	}
}

// checkOrder checks that n messages had their effect, each key in its order, and at most once if once is set. A second effect
// does not count for the order.
func (k *kit) checkOrder(name string, n int, once bool) {
	k.Helper()
	seen, next := map[string]int{}, map[string]int{}
	for _, d := range k.listDocuments(name, options.Find().SetSort(bson.D{{Key: "$natural", Value: 1}})) {
		id, key := d["id"].(string), d["key"].(string)
		seen[id]++
		if seen[id] > 1 {
			if once {
				k.Errorf("%s had its effect twice", id)
			}
			continue
		}
		if want := strconv.Itoa(next[key]); d["value"] != want {
			k.Errorf("key %s: %s in place of %s", key, d["value"], want)
		}
		next[key]++
	}
	if len(seen) != n {
		k.Errorf("%d of %d messages had their effect", len(seen), n)
	}
}

func (k *kit) listDocuments(name string, opts ...options.Lister[options.FindOptions]) []bson.M {
	k.Helper()
	cur, err := k.db.Collection(name).Find(k.context(), bson.D{}, opts...)
	if err != nil {
		k.Fatal(err)
	}
	var docs []bson.M
	if err := cur.All(k.context(), &docs); err != nil {
		k.Fatal(err)
	}
	return docs
}

// describeGroup describes the members, the offsets, the watermarks and the messages that wait.
func (k *kit) describeGroup(members []randomMember) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d effects, committed %v\n", time.Now().UTC(), k.countDocuments("effects"), k.readCommitted(randomPartitions))
	for i, m := range members {
		fmt.Fprintf(&b, "member %d: %+v\n", i, m.Status())
	}
	fields := options.Find().SetProjection(bson.D{{Key: "v", Value: 0}, {Key: "hd", Value: 0}, {Key: "hist", Value: 0}})
	for _, name := range []string{"inbox_offsets", "inbox_tenures", setaside.DefaultCollection} {
		for _, d := range k.listDocuments(name, fields) {
			fmt.Fprintf(&b, "%s: %v\n", name, d)
		}
	}
	return b.String()
}
