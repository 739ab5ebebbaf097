package inboxtest

import (
	"errors"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// ask attaches as a consumer does that reads the same end and epoch whenever it asks.
func (s suite) ask(x Inbox, end int64, epoch int32) (inbox.Generation, error) {
	return s.askLog(x, inbox.Log{End: end, Epoch: epoch})
}

func (s suite) askLog(x Inbox, l inbox.Log) (inbox.Generation, error) {
	g, err := x.Attach(s.ctx(), consumerA, topic, 3, l)
	if errors.Is(err, inbox.ErrUnconfirmed) {
		return x.Attach(s.ctx(), consumerA, topic, 3, l)
	}
	return g, err
}

func (s suite) attachLog(l inbox.Log, want inbox.Generation) {
	s.Helper()
	got, err := s.askLog(s.Inbox, l)
	s.ok(err)
	if got != want {
		s.Fatalf("the generation is %+v, want %+v", got, want)
	}
}

func (s suite) attach(x Inbox, end int64, epoch int32, want inbox.Generation) {
	s.Helper()
	got, err := s.ask(x, end, epoch)
	s.ok(err)
	if got != want {
		s.Fatalf("the generation is %+v, want %+v", got, want)
	}
}

func generationByEnd(s suite) {
	s.attach(s.Inbox, 0, 5, inbox.Generation{})
	s.fresh([]bool{true, true, true}, placed("1", 0, 10), bare(0, 11), placed("2", 1, 20))
	s.attach(s.Inbox, 21, 5, inbox.Generation{Watermark: 21})  // all was handled
	s.attach(s.Inbox, 500, 5, inbox.Generation{Watermark: 21}) // markers and compaction leave holes
	s.attach(s.Inbox, -1, -1, inbox.Generation{Watermark: 21}) // unknown
	s.fresh([]bool{false, false}, bare(0, 11), placed("2", 1, 20))
	s.ok(s.handled(s.claim(s.Inbox, bare(0, 12))))
	s.attach(s.Inbox, 20, 5, inbox.Generation{Number: 1, Recreated: true})
	s.ok(s.claim(s.Inbox, bare(0, 12)).Release(s.ctx()))
	// The places are new; an id is what it was.
	s.fresh([]bool{true, true, false, true}, placed("3", 0, 3), bare(0, 11), placed("1", 0, 12), placed("4", 1, 4))
	s.fresh([]bool{false, false}, placed("3", 0, 3), bare(0, 11))
	s.attach(s.Inbox, 13, 5, inbox.Generation{Number: 1, Watermark: 13})
	s.attach(s.Inbox, 0, 5, inbox.Generation{Number: 2, Recreated: true})
	s.ok(s.handled(s.claim(s.Inbox, bare(0, 11))))
	_, err := s.Inbox.Claim(s.ctx(), bare(0, 11), 0)
	s.want(err, inbox.ErrDuplicate)
}

func generationByEpoch(s suite) {
	s.attach(s.Inbox, 100, 4, inbox.Generation{})
	s.fresh([]bool{true}, placed("1", 0, 10)) // of leader epoch 5
	s.attach(s.Inbox, 100, 5, inbox.Generation{Watermark: 11})
	s.attach(s.Inbox, 100, -1, inbox.Generation{Watermark: 11})
	s.attach(s.Inbox, 100, 7, inbox.Generation{Watermark: 11})
	s.attach(s.Inbox, 100, 6, inbox.Generation{Number: 1, Recreated: true})
	s.fresh([]bool{true}, placed("2", 0, 0))
	s.attach(s.Inbox, 100, 6, inbox.Generation{Number: 1, Watermark: 1})
}

func generationByTopicID(s suite) {
	s.attachLog(inbox.Log{ID: "c/a", End: 0, Epoch: 5}, inbox.Generation{})
	s.fresh([]bool{true, true}, placed("1", 0, 10), placed("2", 1, 20))
	s.attachLog(inbox.Log{ID: "c/a", End: 500, Epoch: 5}, inbox.Generation{Watermark: 21})
	s.attachLog(inbox.Log{End: 500, Epoch: 5}, inbox.Generation{Watermark: 21}) // somebody who does not know the id
	// A topic of the same name with as many records, and one of another cluster.
	s.attachLog(inbox.Log{ID: "c/b", End: 500, Epoch: 5}, inbox.Generation{Number: 1, Recreated: true})
	s.fresh([]bool{true}, placed("3", 0, 10))
	s.attachLog(inbox.Log{ID: "d/b", End: 500, Epoch: 5}, inbox.Generation{Number: 2, Recreated: true})
	s.fresh([]bool{true}, placed("4", 0, 10))
	// A leader that was deposed and still answers is of the same topic.
	s.attachLog(inbox.Log{ID: "d/b", End: 500, Epoch: 3}, inbox.Generation{Number: 2, Watermark: 11})
}

func truncatedTopic(s suite) {
	s.attachLog(inbox.Log{ID: "c/a", End: 0, Epoch: 5}, inbox.Generation{})
	s.fresh([]bool{true, true}, placed("1", 0, 10), placed("2", 1, 20))
	s.attachLog(inbox.Log{ID: "c/a", End: 20, Epoch: 6}, inbox.Generation{Watermark: 20})
	s.fresh([]bool{false, true, false}, placed("3", 0, 9), placed("4", 1, 20), placed("2", 1, 21))
	_, err := s.askLog(s.Halting, inbox.Log{ID: "c/a", End: 20, Epoch: 6})
	s.want(err, inbox.ErrRecreated)
}

func generationHalts(s suite) {
	s.attach(s.Halting, 100, 5, inbox.Generation{})
	s.fresh([]bool{true}, placed("1", 0, 10))
	for range 2 {
		_, err := s.ask(s.Halting, 4, 5)
		s.want(err, inbox.ErrRecreated)
		var re *inbox.RecreatedError
		if !errors.As(err, &re) || re.Watermark != 11 || re.End != 4 || re.Topic != topic || re.Partition != 3 || re.Consumer != consumerA {
			s.Fatalf("the error is %#v", err)
		}
	}
	s.fresh([]bool{false}, placed("2", 0, 5))
	s.attach(s.Inbox, 4, 5, inbox.Generation{Number: 1, Recreated: true}) // somebody decided
	s.attach(s.Halting, 4, 5, inbox.Generation{Number: 1})
}

// generationOfAnother: what a process fetched before another noticed that the topic is new must not move the new topic's
// watermark, or it would refuse the records before it.
func generationOfAnother(s suite) {
	s.attach(s.Other, 100, 5, inbox.Generation{})
	s.fresh([]bool{true}, placed("1", 0, 50))
	s.attach(s.Inbox, 7, 5, inbox.Generation{Number: 1, Recreated: true})
	for _, e := range []inbox.Entry{placed("2", 0, 60), placed("3", 9, 60)} {
		_, err := s.admit(s.Other, e)
		s.want(err, inbox.ErrStale)
		s.want(s.Other.Pass(s.ctx(), []inbox.Entry{e}), inbox.ErrStale)
		_, err = s.Other.Claim(s.ctx(), e, 0)
		s.want(err, inbox.ErrStale)
	}
	s.fresh([]bool{true, true}, placed("4", 0, 5), placed("5", 9, 6))
	s.attach(s.Other, 7, 5, inbox.Generation{Number: 1, Watermark: 7})
	s.fresh([]bool{true}, placed("6", 0, 60))
}
