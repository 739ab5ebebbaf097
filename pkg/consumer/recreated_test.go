package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
)

// recreateTopic deletes the topic of the kit, whose partition 0 must have records, and creates an empty one of the same name. It
// returns when the broker has the new topic: the controller creates it while the broker may still have the old one,
// and a record that is published then is deleted with the old topic.
func (k *kit) recreateTopic(partitions int) {
	k.Helper()
	adm, done := k.newAdmin()
	defer done()

	if res, err := adm.DeleteTopics(k.context(), k.topic); err != nil || res.Error() != nil {
		k.Fatal(err, res.Error())
	}

	k.waitUntil("the new topic", func(ctx context.Context) bool {
		_, err := adm.CreateTopic(ctx, int32(partitions), 1, nil, k.topic)
		if err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
			return false
		}
		ends, err := adm.ListEndOffsets(ctx, k.topic)
		end, ok := ends.Lookup(k.topic, 0)
		return err == nil && ok && end.Err == nil && end.Offset == 0
	})
}

func (k *kit) newAdmin() (*kadm.Client, func()) {
	k.Helper()
	cl, err := kgo.NewClient(kgo.SeedBrokers(k.cfg.Brokers...))
	if err != nil {
		k.Fatal(err)
	}
	return kadm.NewClient(cl), cl.Close
}

// refill writes n messages with new ids to the topic, and repeats that until a broker takes them.
func (k *kit) refill(n int) {
	k.Helper()
	list := make([]*consumer.Message, n)
	for i := range list {
		list[i] = newMessage(fmt.Sprintf("key%02d", i), "counted", fmt.Sprint("new", i))
	}
	k.waitUntil("the records", func(ctx context.Context) bool { return k.kafka.Publish(ctx, k.topic, newRecords(list...)) == nil })
}

// readOffset returns what the group has committed for partition 0.
func (k *kit) readOffset() kadm.OffsetResponse {
	k.Helper()
	adm, done := k.newAdmin()
	defer done()
	list, err := adm.FetchOffsets(k.context(), k.group)
	at, ok := list.Lookup(k.topic, 0)
	if err != nil || !ok {
		k.Fatal(list, err)
	}
	return at
}

// commitOffset commits for partition 0 as a tool does, with a text.
func (k *kit) commitOffset(at int64, text string) {
	k.Helper()
	adm, done := k.newAdmin()
	defer done()
	offsets := kadm.Offsets{}
	offsets.Add(kadm.Offset{Topic: k.topic, At: at, LeaderEpoch: -1, Metadata: text})
	if res, err := adm.CommitOffsets(k.context(), k.group, offsets); err != nil || res.Error() != nil {
		k.Fatal(err, res.Error())
	}
}

// N29: a topic that is deleted and created again is read from its start, whatever the members know about it and whatever offset
// the group has. Its offsets are committed again, so that nothing is lost or repeated after the next start.
func TestN29_ATopicThatWasCreatedAgainIsReadFromItsStart(t *testing.T) {
	t.Parallel()
	type scene struct {
		k      *kit
		run    func() *consumer.Consumer // starts another member, after the former one has stopped
		stop   func()
		paused *consumer.Consumer
	}
	cases := map[string]func(s *scene){
		// The member has handled the records of the old topic.
		"under a member": func(s *scene) {
			s.paused.Pause()
			s.k.recreateTopic(1)
			s.k.refill(6)
			s.paused.Resume()
		},
		// The member has read nothing since it got the partition.
		"under an idle member": func(s *scene) {
			c := s.run()
			s.k.waitUntil("the partition", func(context.Context) bool { return len(c.Status().Partitions) == 1 })
			c.Pause()
			s.k.recreateTopic(1)
			s.k.refill(6)
			c.Resume()
		},
		// Kafka deletes the offsets of the group with the topic.
		"while nobody runs": func(s *scene) {
			s.stop()
			s.k.recreateTopic(1)
			s.k.refill(6)
			s.run()
		},
		// A commit of a member came late.
		"with an offset of the old topic": func(s *scene) {
			s.stop()
			before := s.k.readOffset()
			s.k.recreateTopic(1)
			s.k.refill(6)
			s.k.commitOffset(before.At, before.Metadata)
			s.run()
		},
		// A tool knows nothing about ids.
		"with an offset of a tool": func(s *scene) {
			s.stop()
			s.k.recreateTopic(1)
			s.k.refill(6)
			s.k.commitOffset(3, "")
			s.run()
		},
	}

	for name, recreate := range cases {
		for library, use := range map[string]consumer.Option{"kafka-go": nil, "franz": franz.Use()} {
			for i, mode := range []consumer.Mode{consumer.Transactional, consumer.AtLeastOnce, consumer.Claimed, consumer.AtLeastOnceInTransaction} {
				// Each mode has one start with this library, and the other one with the other library.
				start := consumer.Earliest
				if (i%2 == 0) == (library == "franz") {
					start = consumer.Latest
				}
				t.Run(fmt.Sprint(name, "/", library, "/", mode, "/", start), func(t *testing.T) {
					t.Parallel()
					s := &scene{k: newKit(t, 1), stop: func() {}}
					s.run = func() *consumer.Consumer {
						s.stop()
						c := s.k.newConsumer(use, consumer.WithMode(mode), consumer.WithStart(start))
						addHandler(t, c, "counted", s.k.insertInto("effects"))
						s.stop = s.k.start(c)
						return c
					}
					waitOffset := func(at int64) {
						t.Helper()
						s.k.waitUntil(fmt.Sprint("offset ", at), func(context.Context) bool { return s.k.readCommitted(1)[0] == at })
					}

					s.paused = s.run()
					if start == consumer.Latest {
						waitOffset(0)
					}
					s.k.publish(newMessages(1, 3)...)
					waitOffset(3)
					recreate(s)
					waitOffset(6)
					if n := s.k.countDocuments("effects"); n != 9 {
						t.Fatalf("%d of the 6 records of the new topic had an effect", n-3)
					}

					// The next member goes on where this one stops.
					s.k.publish(newMessage("a", "counted", "last"))
					waitOffset(7)
					s.run()
					s.k.publish(newMessage("b", "counted", "after a restart"))
					waitOffset(8)
					if n := s.k.countDocuments("effects"); n != 11 {
						t.Errorf("%d effects of 11 messages", n)
					}
				})
			}
		}
	}
}

// N29: as above, without a pause: the topic does not exist for some time.
func TestN29_ATopicThatComesBackLaterIsReadFromItsStart(t *testing.T) {
	t.Parallel()
	for library, use := range map[string]consumer.Option{"kafka-go": nil, "franz": franz.Use()} {
		t.Run(library, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			start := func() func() {
				c := k.newConsumer(use, consumer.WithMode(consumer.AtLeastOnce))
				addHandler(t, c, "counted", k.insertInto("effects"))
				stop := k.start(c)
				k.waitUntil("the partition", func(context.Context) bool { return len(c.Status().Partitions) == 1 })
				return stop
			}
			stop := start()
			k.publish(newMessages(1, 3)...)
			k.waitUntil("the offset", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })
			stop()
			start()

			adm, done := k.newAdmin()
			defer done()
			if res, err := adm.DeleteTopics(k.context(), k.topic); err != nil || res.Error() != nil {
				t.Fatal(err, res.Error())
			}
			k.waitUntil("the end of the topic", func(ctx context.Context) bool {
				ends, err := adm.ListEndOffsets(ctx, k.topic)
				return err == nil && ends.Error() != nil
			})
			k.waitUntil("the new topic", func(ctx context.Context) bool {
				_, err := adm.CreateTopic(ctx, 1, 1, nil, k.topic)
				return err == nil || errors.Is(err, kerr.TopicAlreadyExists)
			})
			k.refill(6)
			k.waitUntil("the end of the new topic", func(context.Context) bool { return k.readCommitted(1)[0] == 6 })
			if n := k.countDocuments("effects"); n != 9 {
				t.Errorf("%d of the 6 records of the new topic had an effect", n-3)
			}
		})
	}
}

// N29: the partitions of a topic that was created again move between members.
func TestN29_ATopicThatWasCreatedAgainMovesBetweenMembers(t *testing.T) {
	t.Parallel()
	for library, use := range map[string]consumer.Option{"kafka-go": nil, "franz": franz.Use()} {
		t.Run(library, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 2)
			start := func() (*consumer.Consumer, func()) {
				c := k.newConsumer(use, consumer.WithMode(consumer.AtLeastOnce))
				addHandler(t, c, "counted", k.insertInto("effects"))
				return c, k.start(c)
			}
			waitOffsets := func(sum int64) {
				t.Helper()
				k.waitUntil(fmt.Sprint("offsets of ", sum), func(context.Context) bool { return sumOffsets(k.readCommitted(2)) == sum })
			}
			one, _ := start()
			k.publish(newMessages(20, 20)...)
			waitOffsets(20)
			one.Pause()
			k.recreateTopic(2)
			k.refill(30)
			one.Resume()
			waitOffsets(30)

			two, stop := start()
			k.waitUntil("both members to have a partition", func(context.Context) bool {
				return len(one.Status().Partitions) == 1 && len(two.Status().Partitions) == 1
			})
			k.publish(newMessages(40, 40)[20:]...)
			waitOffsets(50)
			stop()
			k.waitUntil("one member to have both partitions", func(context.Context) bool { return len(one.Status().Partitions) == 2 })
			k.publish(newMessages(60, 60)[40:]...)
			waitOffsets(70)
			if n := k.countDocuments("effects"); n != 90 {
				t.Errorf("%d effects of 90 messages", n)
			}
		})
	}
}

// N29: with WithHaltOnLoss, a topic that was created again ends the Run, and commits nothing, so that the next Run ends too.
func TestN29_ATopicThatWasCreatedAgainHaltsTheRun(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.AtLeastOnce} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			newMember := func(opts ...consumer.Option) *consumer.Consumer {
				c := k.newConsumer(append(opts, consumer.WithMode(mode))...)
				addHandler(t, c, "counted", k.insertInto("effects"))
				return c
			}
			stop := k.start(newMember(consumer.WithHaltOnLoss()))
			k.publish(newMessages(1, 3)...)
			k.waitUntil("the offset", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })
			stop()
			k.recreateTopic(1)
			k.refill(6)

			for range 2 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if err := newMember(consumer.WithHaltOnLoss()).Run(ctx); !errors.Is(err, consumer.ErrGap) {
					t.Errorf("the run ends with %v", err)
				}
			}
			if at := k.readCommitted(1)[0]; at != -1 {
				t.Errorf("offset %d is committed", at)
			}
			k.start(newMember())
			k.waitUntil("the end of the new topic", func(context.Context) bool { return k.readCommitted(1)[0] == 6 })
		})
	}
}
