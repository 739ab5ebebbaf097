package consumer_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"go.mongodb.org/mongo-driver/v2/bson"
	driverevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// `go test ./pkg/consumer -run 'RandomFaults|Elections' -fault.for 2h -timeout 0 -v` goes on for that long. The log has the seed, and
// -fault.seed repeats its steps, not the order of the goroutines.
var (
	randomTime = flag.Duration("fault.for", 0, "how long TestRandomFaultsLoseNothing runs; 0: some steps")
	randomSeed = flag.Uint64("fault.seed", 0, "seed of TestRandomFaultsLoseNothing; 0: a new one")
)

// Members join, leave, pause and are killed, their networks fail, handlers are slow and fail, topics are created again, and letters are
// requeued, at random. In the end, each message has had its effect, in the order of its key, and each given-up record has had a letter.
//
// Within two minutes, it has found each of these mistakes, when the code was changed to make them: a partition that was given back keeps
// its mark, the id of a topic is unknown before the first record, an offset of a deleted topic is believed, franz-go commits the
// offsets, the letters of two records with one id replace each other, and equal ids of two topics are one message.
func TestRandomFaultsLoseNothing(t *testing.T) {
	t.Parallel()
	for name, use := range randomLibraries {
		for _, mode := range []consumer.Mode{consumer.Transactional, consumer.AtLeastOnce} {
			t.Run(name+"/"+mode.String(), func(t *testing.T) {
				t.Parallel()
				newStorm(t, newKit(t, randomPartitions), mode, use).run()
			})
		}
	}
}

// As above, while the members of a replica set elect a new primary again and again.
func TestElectionsLoseNothing(t *testing.T) {
	stacktest.OnlyWith(t, "it runs for a given time, with servers of its own", "fault.for")
	stack := stacktest.Own(t, devstack.Options{Mongods: 3, Brokers: 1})
	for name, use := range randomLibraries {
		t.Run(name, func(t *testing.T) {
			k := newKitOn(t, stack, randomPartitions)
			s := newStorm(t, k, consumer.Transactional, use, options.Client().ApplyURI(stack.MongoURI()))
			s.faults = append(s.faults, fault{"elect", s.electPrimary}, fault{"elect", s.electPrimary})
			s.run()
		})
	}
}

var randomLibraries = map[string][]consumer.Option{"kafka-go": nil, "franz": {franz.Use()}}

const (
	randomPartitions = 4
	randomKeys       = 20 // so that each partition has some
	shortSteps       = 2  // of faults, in each run of the tests
	mostMembers      = 4
)

// storm is a group under random faults, with the model of what it has to do.
type storm struct {
	*kit
	random  *rand.Rand
	mode    consumer.Mode
	opts    []consumer.Option
	client  []*options.ClientOptions
	other   string // a second topic, with the ids of the first
	box     *outbox.Box
	members []*stormMember
	faults  []fault

	calm  atomic.Bool  // no handler fails
	slow  atomic.Bool  // each handler takes some time
	kills atomic.Int64 // sessions of other members that a member has ended
	clock atomic.Int64 // counts attempts. The natural order of documents changes with the primary

	records map[place]int    // by message: how many
	next    map[string]int   // by key and type: the value of the next message
	tallies map[string][]int // by key: the steps of its saga
	rounds  int              // how often something was published to the topic
}

// fault is a step. Its name is in the log.
type fault struct {
	name string
	do   func()
}

// place is a message in a topic.
type place struct{ topic, id string }

// stormMember is a running member of the group.
type stormMember struct {
	*consumer.Consumer
	mongo, kafka *line
	cancel       context.CancelFunc
	done         chan error
}

// counting is the saga of a key. It has the values of its messages.
type counting struct{ Steps []int }

type tallyStep struct {
	Key string
	N   int
}

var tallied = event.Type[tallyStep]{Aggregate: "tally", Name: "tallied"}

func newStorm(t *testing.T, k *kit, mode consumer.Mode, use []consumer.Option, client ...*options.ClientOptions) *storm {
	t.Helper()
	seed := *randomSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-fault.seed %d", seed)

	k.cfg.SessionTimeout, k.cfg.RebalanceTimeout = 6*time.Second, 6*time.Second
	s := &storm{
		kit: k, random: rand.New(rand.NewPCG(seed, 0)), mode: mode, client: client, other: k.topic + "_other",
		records: map[place]int{}, next: map[string]int{}, tallies: map[string][]int{},
	}
	s.opts = append(s.opts, use...)
	s.opts = append(s.opts, consumer.WithMode(mode), consumer.WithRetry(soon), consumer.WithDrain(3*time.Second), consumer.WithTopics(s.other))
	stacktest.CreateTopicOn(t, k.cfg.Brokers, s.other, randomPartitions, 1)
	box, err := outbox.New(k.db)
	if err != nil {
		t.Fatal(err)
	}
	s.box = box
	k.newCollection("effects")
	s.faults = []fault{
		{"join", s.join},
		{"leave", s.leave},
		{"kill", s.kill},
		{"pause", s.pause},
		{"cut MongoDB", s.cutMongoDB},
		{"cut Kafka", s.cutKafka},
		{"requeue", s.requeueKey},
		{"create the topic again", s.recreate},
		{"create the topic again", s.recreate},
	}
	return s
}

// newKitOn returns a kit on servers of the test.
func newKitOn(t *testing.T, stack *devstack.Stack, partitions int) *kit {
	t.Helper()
	k := &kit{TB: t, topic: stacktest.Name(t), group: stacktest.Name(t)}
	stacktest.CreateTopicOn(t, stack.Brokers(), k.topic, partitions, 1)
	k.db = stacktest.Database(t, stacktest.Client(t, options.Client().ApplyURI(stack.MongoURI())))
	k.cfg = transport.Config{
		Brokers: stack.Brokers(), HeartbeatInterval: 100 * time.Millisecond, JoinBackoff: 100 * time.Millisecond, MaxWait: 100 * time.Millisecond,
	}
	k.openKafka()
	return k
}

// run makes the steps, and checks the model.
func (s *storm) run() {
	s.Helper()
	// Nothing fails in the first steps, so no member may end transactions of another one.
	s.calm.Store(true)
	s.slow.Store(true)
	s.join()
	s.join()
	quiet := []fault{{"join", s.join}, {"leave", s.leave}, {"pause", s.pause}}
	quietSteps := 1
	if *randomTime > 0 {
		quietSteps = 4
	}
	for i := range quietSteps {
		s.publishSome()
		s.pickOne(quiet[:min(1+i*len(quiet), len(quiet))]...)
		// While the members that stay are busy, the others handle the first messages of the partitions that have moved.
		s.awaitMembers()
		for range 3 {
			s.publishSome()
			s.sleep(50, 150)
		}
	}
	s.awaitFinished()
	s.slow.Store(false)
	if n := s.kills.Load(); n > 0 {
		s.Errorf("members have ended the transactions of other living members %d times", n)
	}

	s.calm.Store(false)
	// No kind of fault comes twice before each has come once.
	end := time.Now().Add(*randomTime)
	var order []int
	for i := 0; i < shortSteps || time.Now().Before(end); i++ {
		if len(order) == 0 {
			order = s.random.Perm(len(s.faults))
		}
		s.publishSome()
		s.pickOne(s.faults[order[0]])
		order = order[1:]
		s.sleep(100, 500)
	}
	s.finish()
}

// pickOne makes one of the steps.
func (s *storm) pickOne(list ...fault) {
	s.Helper()
	f := list[s.random.IntN(len(list))]
	s.Logf("%s: %s", time.Now().UTC().Format(time.StampMilli), f.name)
	f.do()
}

// sleep lets the members work for some milliseconds.
func (s *storm) sleep(least, most int) {
	<-time.After(time.Duration(least+s.random.IntN(most-least)) * time.Millisecond)
}

// join starts a member, unless there are enough.
func (s *storm) join() {
	if len(s.members) >= mostMembers {
		return
	}
	m := &stormMember{mongo: newLine(), kafka: newLine(), done: make(chan error, 1)}
	monitor := &driverevent.CommandMonitor{Started: s.countKills()}
	k := newKitOf(s.kit, append(s.client, options.Client().SetDialer(m.mongo).SetMonitor(monitor).SetServerSelectionTimeout(3*time.Second))...)
	k.cfg.Dial = m.kafka.DialContext
	opts := s.opts[:len(s.opts):len(s.opts)]
	if s.random.IntN(2) == 0 {
		opts = append(opts, consumer.WithMaxOutage(time.Second))
	}
	m.Consumer = k.newConsumer(opts...)
	addHandler(s, m.Consumer, "counted", s.handleWith(k))
	addHandler(s, m.Consumer, "rejected", s.handleWith(k))
	if s.mode == consumer.Transactional {
		s.addSaga(k, m.Consumer)
	}

	ctx, cancel := context.WithCancel(context.WithoutCancel(s.Context()))
	m.cancel = cancel
	go func() {
		err := m.Run(ctx)
		// The process of a member ends with it. After an hour, the clients of hundreds of members would occupy the server.
		call, stop := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer stop()
		// It closes the connections also if the line is cut.
		_ = k.db.Client().Disconnect(call)
		m.done <- err
	}()
	s.Cleanup(func() { s.end(m) })
	s.members = append(s.members, m)
}

// countKills returns the monitor of a member. It counts the sessions that the member ends, except its own.
func (s *storm) countKills() func(ctx context.Context, e *driverevent.CommandStartedEvent) {
	var own sync.Map
	return func(_ context.Context, e *driverevent.CommandStartedEvent) {
		if e.CommandName != "killSessions" {
			own.Store(e.Command.Lookup("lsid", "id").String(), nil)
			return
		}

		list, err := e.Command.Lookup("killSessions").Array().Values()
		if err != nil {
			s.Error(err)
		}
		for _, v := range list {
			if _, ok := own.Load(v.Document().Lookup("id").String()); !ok {
				s.kills.Add(1)
			}
		}
	}
}

// end stops a member and waits for its end. It may be called again.
func (s *storm) end(m *stormMember) {
	m.cancel()
	select {
	case err := <-m.done:
		if err != nil && !m.kafka.isCut() {
			s.Errorf("Run: %v", err)
		}
		m.done <- nil
	case <-time.After(patience):
		s.Error("Run does not end")
	}
}

// takeOut removes a member from the list.
func (s *storm) takeOut() *stormMember {
	i := s.random.IntN(len(s.members))
	m := s.members[i]
	s.members = slices.Delete(s.members, i, i+1)
	return m
}

// leave stops a member. One is left.
func (s *storm) leave() {
	if len(s.members) < 2 {
		s.join()
		return
	}
	s.end(s.takeOut())
}

// kill ends a member without a goodbye: nothing that it sends arrives any more.
func (s *storm) kill() {
	m := s.takeOut()
	m.mongo.cut()
	m.kafka.cut()
	m.cancel()
	s.join()
}

func (s *storm) pause() {
	m := s.members[s.random.IntN(len(s.members))]
	m.Pause()
	s.sleep(100, 500)
	m.Resume()
}

func (s *storm) cutMongoDB() { s.cutLine(s.members[s.random.IntN(len(s.members))].mongo) }
func (s *storm) cutKafka()   { s.cutLine(s.members[s.random.IntN(len(s.members))].kafka) }

// cutLine breaks the connections of a line, and keeps it cut for a moment or for longer.
func (s *storm) cutLine(l *line) {
	l.cut()
	if s.random.IntN(2) == 0 {
		s.sleep(100, 1500)
	}
	l.restore()
}

func (s *storm) electPrimary() {
	step := bson.D{{Key: "replSetStepDown", Value: 5}, {Key: "secondaryCatchUpPeriodSecs", Value: 4}}
	// The server may respond, or close the connection.
	_ = s.db.Client().Database("admin").RunCommand(s.context(), step).Err()
}

// requeueKey requeues all letters of a key, also those that were requeued before. In hours, these of all keys are too many for a step.
func (s *storm) requeueKey() {
	s.Helper()
	s.requeueLetters(deadletter.Query{Key: fmt.Append(nil, "key", s.random.IntN(randomKeys))})
}

func (s *storm) requeueLetters(query deadletter.Query) {
	s.Helper()
	var err error
	stacktest.Eventually(s, "the requeue", func() bool {
		_, err = s.newDesk().Requeue(s.context(), query, deadletter.RequeueOptions{})
		return err == nil
	}, func() any { return err })
}

// publishSome publishes some messages. The second topic gets the same ones, except those of sagas.
func (s *storm) publishSome() {
	s.Helper()
	var both, first []*consumer.Message
	for range 10 {
		key := fmt.Sprint("key", s.random.IntN(randomKeys))
		switch dice := s.random.IntN(10); {
		case dice < 6:
			both = append(both, s.newNext(key, "counted"))
		case dice < 8 && s.mode == consumer.Transactional:
			m := s.newNext(key, "tallied")
			n := s.next[key+"tallied"] - 1
			m.Value = fmt.Appendf(nil, `{"Key":%q,"N":%d}`, key, n)
			s.tallies[key] = append(s.tallies[key], n)
			first = append(first, m)
		case dice < 9:
			both = append(both, s.newNext(key, "rejected"))
		default:
			// A producer uses an id twice.
			m := s.newNext(key, "rejected")
			both = append(both, m, m)
		}
	}

	s.rounds++
	s.publishTo(s.topic, append(first, both...))
	s.publishTo(s.other, both)
	s.Logf("%s: published up to %v", time.Now().UTC().Format(time.StampMilli), s.next)
}

// newNext returns the next message of a key and a type.
func (s *storm) newNext(key, typ string) *consumer.Message {
	n := s.next[key+typ]
	s.next[key+typ]++
	return newMessage(key, typ, fmt.Sprint(n))
}

func (s *storm) publishTo(topic string, ms []*consumer.Message) {
	s.Helper()
	s.waitUntil("the records", func(ctx context.Context) bool { return s.kafka.Publish(ctx, topic, newRecords(ms...)) == nil })
	for _, m := range ms {
		id, _ := m.Header("id")
		s.records[place{topic, string(id)}]++
	}
}

// handleWith returns a handler that inserts a document. Unless it is calm, it fails at random. It gives up messages of the type
// rejected that were not requeued.
func (s *storm) handleWith(k *kit) consumer.HandlerFunc {
	effects := k.db.Collection("effects")
	return func(ctx context.Context, m *consumer.Message) error {
		dice := rand.N(100)
		switch {
		case m.Name == "rejected" && m.Delivery == 0:
			return consumer.Reject(errWanted)
		case s.slow.Load(), dice < 8:
			<-time.After(200 * time.Millisecond)
		case s.calm.Load():
		case dice < 12:
			return errWanted
		case dice < 14:
			return consumer.RetryIn(100*time.Millisecond, nil)
		case dice < 15:
			panic(errWanted)
		}

		_, err := effects.InsertOne(ctx, bson.D{
			{Key: "id", Value: m.ID},
			{Key: "topic", Value: m.Topic},
			{Key: "key", Value: string(m.Key)},
			{Key: "value", Value: string(m.Value)},
			{Key: "type", Value: m.Name},
			{Key: "at", Value: s.clock.Add(1)},
			// For the report of a wrong order.
			{Key: "record", Value: fmt.Sprintf("%d@%d, epoch %d, attempt %d, %s", m.Partition, m.Offset, m.LeaderEpoch, m.Attempt, time.Now().UTC().Format(time.StampMilli))},
		})
		if dice == 99 && !s.calm.Load() {
			return errWanted
		}
		return err
	}
}

// addSaga adds a saga for each key, which appends the values of its messages.
func (s *storm) addSaga(k *kit, c *consumer.Consumer) {
	s.Helper()
	box, err := outbox.New(k.db)
	if err != nil {
		s.Fatal(err)
	}
	tallies := saga.Define[counting]("tallies")
	saga.StartOrOn(tallies, tallied, func(_ context.Context, in *saga.Instance[counting], p tallyStep) error {
		in.State.Steps = append(in.State.Steps, p.N)
		in.Emit(event.New(event.Aggregate{Type: "tally", ID: in.ID()}, "Stepped", event.JSON(p.N)))
		return nil
	}, saga.By(func(p tallyStep) string { return p.Key }))

	h, err := tallies.Handler(box)
	if err != nil {
		s.Fatal(err)
	}
	if err := c.Handle("tallies", h); err != nil {
		s.Fatal(err)
	}
}

// awaitMembers blocks until each member has partitions, and all partitions have members.
func (s *storm) awaitMembers() {
	s.Helper()
	stacktest.EventuallyIn(s, time.Minute, "each member to have partitions", func() bool {
		n := 0
		for _, m := range s.members {
			own := len(m.Status().Partitions)
			if own == 0 {
				return false
			}
			n += own
		}
		return n == 2*randomPartitions
	}, func() any { return s.describe() })
}

// awaitFinished blocks until the group has committed the ends of both topics.
func (s *storm) awaitFinished() {
	s.Helper()
	stacktest.EventuallyIn(s, 2*time.Minute, "the offsets at the ends of the topics", func() bool {
		for _, topic := range []string{s.topic, s.other} {
			committed := s.committedOf(topic, randomPartitions)
			for i, end := range s.readAllEnds(topic) {
				if end > 0 && committed[i] != end {
					return false
				}
			}
		}
		return true
	}, func() any { return s.describe() })
}

// readAllEnds returns the ends of a topic, by partition.
func (s *storm) readAllEnds(topic string) []int64 {
	s.Helper()
	adm, done := s.newAdmin()
	defer done()

	ends := make([]int64, randomPartitions)
	s.waitUntil("the ends", func(ctx context.Context) bool {
		list, err := adm.ListEndOffsets(ctx, topic)
		if err != nil {
			return false
		}
		for i := range ends {
			end, ok := list.Lookup(topic, int32(i))
			if !ok || end.Err != nil {
				return false
			}
			ends[i] = end.Offset
		}
		return true
	})
	return ends
}

// recreate deletes the topic, whose records are all finished, and creates it again. The members have read different parts of the topic before.
func (s *storm) recreate() {
	s.Helper()
	// While a broker replaces the topic, only the ends show whether it still has the partitions of the old one.
	for slices.Contains(s.readAllEnds(s.topic), 0) {
		s.publishSome()
	}
	s.awaitFinished()
	s.Logf("%s: finished", time.Now().UTC().Format(time.StampMilli))
	stopAll := func() {
		for len(s.members) > 0 {
			s.end(s.takeOut())
		}
	}
	start := func() {
		s.join()
		s.join()
		s.awaitMembers()
	}
	again := func() {
		rounds := 1
		// An old offset is wrong in two ways: after the end of the new topic, or among its records.
		if s.random.IntN(3) > 0 {
			rounds = min(s.rounds, 20)*3/2 + 1
		}
		s.createAgain()
		s.rounds = 0
		for range rounds {
			s.publishSome()
		}
	}
	paused := func() {
		for _, m := range s.members {
			m.Pause()
		}
		again()
		for _, m := range s.members {
			m.Resume()
		}
	}

	late := ""
	if s.readCommitted(randomPartitions)[0] > 0 {
		late = s.readOffset().Metadata
	}
	s.pickOne(
		fault{"under members", again},
		fault{"under paused members", paused},
		fault{"under paused members that have read nothing", func() { stopAll(); start(); paused() }},
		fault{"under paused members that have read nothing", func() { stopAll(); start(); paused() }},
		fault{"under members that have read nothing", func() { stopAll(); start(); again() }},
		fault{"while nobody runs", func() { stopAll(); again(); start() }},
		fault{"with a late commit", func() { stopAll(); again(); s.commitOffset(1, late); start() }},
		fault{"with a commit of a tool", func() { stopAll(); again(); s.commitOffset(1, ""); start() }},
	)
}

// createAgain deletes the topic and creates it again. It returns when the brokers have the new one.
func (s *storm) createAgain() {
	s.Helper()
	adm, done := s.newAdmin()
	defer done()
	old := s.readTopicID(adm)
	if res, err := adm.DeleteTopics(s.context(), s.topic); err != nil || res.Error() != nil {
		s.Fatal(err, res.Error())
	}

	s.waitUntil("the new topic", func(ctx context.Context) bool {
		_, _ = adm.CreateTopic(ctx, randomPartitions, 1, nil, s.topic)
		now := s.readTopicID(adm)
		return now != (kadm.TopicID{}) && now != old
	})
	for _, end := range s.readAllEnds(s.topic) {
		if end != 0 {
			s.Fatal("the new topic has records")
		}
	}
}

// readTopicID returns the id of the topic; zero if there is none.
func (s *storm) readTopicID(adm *kadm.Client) kadm.TopicID {
	list, err := adm.ListTopics(s.context(), s.topic)
	if err != nil || list[s.topic].Err != nil {
		return kadm.TopicID{}
	}
	return list[s.topic].ID
}

// finish waits until everything has had its effect, and checks it.
func (s *storm) finish() {
	s.Helper()
	s.Logf("%s: finishing", time.Now().UTC().Format(time.StampMilli))
	s.calm.Store(true)
	for len(s.members) < 2 {
		s.join()
	}
	s.awaitFinished()
	no := false
	// After hours, there are too many letters for one step, and their messages take minutes.
	for key := range randomKeys {
		s.requeueLetters(deadletter.Query{Requeued: &no, Key: fmt.Append(nil, "key", key)})
	}
	stacktest.EventuallyIn(s, 2*time.Minute+*randomTime, "the end of all messages", func() bool {
		s.requeueLetters(deadletter.Query{Requeued: &no, All: true})
		open, err := s.newDesk().Count(s.context(), deadletter.Query{Requeued: &no})
		return err == nil && open == 0 && s.countDocuments(setaside.DefaultCollection) == 0 && len(s.findMissing()) == 0
	}, func() any { return s.describe() })

	s.checkEffects()
	s.checkLetters()
	s.checkTallies()
}

// findMissing returns the messages without an effect.
func (s *storm) findMissing() (missing []place) {
	s.Helper()
	seen := map[place]bool{}
	for _, d := range s.listDocuments("effects") {
		seen[place{d["topic"].(string), d["id"].(string)}] = true
	}
	for m := range s.records {
		if !seen[m] && !strings.Contains(m.id, "/tallied/") {
			missing = append(missing, m)
		}
	}
	return missing
}

// checkEffects checks the number of effects and the order of each key.
func (s *storm) checkEffects() {
	s.Helper()
	seen, next := map[place]int{}, map[place]int{}
	for _, d := range s.listDocuments("effects", options.Find().SetSort(bson.D{{Key: "at", Value: 1}})) {
		m := place{d["topic"].(string), d["id"].(string)}
		if seen[m]++; seen[m] > 1 {
			if s.mode == consumer.Transactional {
				s.Errorf("%v had its effect twice", m)
			}
			continue
		}

		// A message that was given up leaves the order of its key.
		if d["type"] != "counted" {
			continue
		}
		key := place{m.topic, d["key"].(string)}
		if want := fmt.Sprint(next[key]); d["value"] != want {
			s.Errorf("%v: %s (%s) in place of %s", key, d["value"], d["record"], want)
		}
		next[key]++
	}
}

// checkLetters checks that each record of a rejected message has had a letter.
func (s *storm) checkLetters() {
	s.Helper()
	letters := map[place]int{}
	for l, err := range s.newDesk().List(s.context(), deadletter.Query{}) {
		if err != nil {
			s.Fatal(err)
		}
		if l.Class != deadletter.ClassRejected {
			s.Errorf("%s: class %s: %s", l.ID, l.Class, l.Reason)
		}
		letters[place{l.ID.Topic, l.ID.Message}]++
	}

	for m, n := range s.records {
		// The second record is a duplicate if the first one was requeued and handled before.
		if s.mode == consumer.Transactional {
			n = 1
		}
		if strings.Contains(m.id, "/rejected/") && letters[m] < n {
			s.Errorf("%v: %d records have %d letters", m, n, letters[m])
		}
	}
}

// checkTallies checks that each saga has had its steps once, in order, and has emitted an event for each.
func (s *storm) checkTallies() {
	s.Helper()
	steps := 0
	for key, want := range s.tallies {
		steps += len(want)
		snapshot, err := saga.NewDesk(s.box).Get(s.context(), saga.Ref{Saga: "tallies", ID: key})
		var got counting
		if err == nil {
			err = bson.UnmarshalExtJSON(snapshot.State, false, &got)
		}
		if err != nil || !slices.Equal(got.Steps, want) {
			s.Errorf("saga %s: steps %v, want %v, %v", key, got.Steps, want, err)
		}
	}

	if n := s.countDocuments("outbox"); n != steps {
		s.Errorf("%d events of %d steps", n, steps)
	}
}

// describe describes the members, the offsets and the messages that wait.
func (s *storm) describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: committed %v of %v and %v of %v, missing %v\n", time.Now().UTC(), s.committedOf(s.topic, randomPartitions),
		s.readAllEnds(s.topic), s.committedOf(s.other, randomPartitions), s.readAllEnds(s.other), s.findMissing())
	for i, m := range s.members {
		fmt.Fprintf(&b, "member %d: %+v\n", i, m.Status())
	}

	fields := options.Find().SetProjection(bson.D{{Key: "v", Value: 0}, {Key: "hd", Value: 0}, {Key: "hist", Value: 0}})
	for _, name := range []string{"inbox_tenures", setaside.DefaultCollection} {
		for _, d := range s.listDocuments(name, fields) {
			fmt.Fprintf(&b, "%s: %v\n", name, d)
		}
	}
	return b.String()
}

func (k *kit) listDocuments(name string, opts ...options.Lister[options.FindOptions]) []bson.M {
	k.Helper()
	var docs []bson.M
	k.waitUntil("the documents of "+name, func(ctx context.Context) bool {
		docs = nil
		cur, err := k.db.Collection(name).Find(ctx, bson.D{}, opts...)
		return err == nil && cur.All(ctx, &docs) == nil
	})
	return docs
}
