package deadletter

import (
	"testing"
	"time"
)

func TestPartsFitTheServer(t *testing.T) {
	t.Parallel()
	p := newPace()
	for range 10 {
		p.recordDuration(10*time.Millisecond, p.partSize)
	}
	if p.partSize != MaxLetters {
		t.Errorf("parts of %d on a quick server", p.partSize)
	}
	p.recordDuration(200*time.Millisecond, p.partSize)
	if p.partSize != MaxLetters {
		t.Errorf("parts of %d, with nothing to change", p.partSize)
	}
	p.recordDuration(time.Second, 300) // a part that its bytes had cut
	if p.partSize != 150 {
		t.Errorf("parts of %d after a slow one of 300", p.partSize)
	}
	p.recordDuration(time.Millisecond, 10) // tells nothing of 150
	if p.partSize != 150 {
		t.Errorf("parts of %d after a small one", p.partSize)
	}
	for range 10 {
		p.recordDuration(time.Second, p.partSize)
	}
	if p.partSize != minPartSize {
		t.Errorf("parts of %d on a slow server", p.partSize)
	}
	p.recordTimeout(20)
	p.recordDuration(time.Second, 5)
	if p.partSize != 5 {
		t.Errorf("parts of %d although those of 20 never ended", p.partSize)
	}
}

func TestAPartHasAtMostItsLettersAndBytes(t *testing.T) {
	t.Parallel()
	small, large := preparedLetter{}, preparedLetter{dead: Dead{Envelope: make([]byte, MaxBytes/2)}}
	var many []preparedLetter
	for range 2 * MaxLetters {
		many = append(many, small)
	}
	for _, c := range []struct {
		rest        []preparedLetter
		limit, want int
	}{
		{many, MaxLetters, MaxLetters}, {many, 25, 25}, {many[:3], 25, 3}, {[]preparedLetter{large, large, large}, 25, 1}, {[]preparedLetter{large, small, small, large}, 25, 3}, {nil, 25, 0},
	} {
		if got := countFitting(c.rest, c.limit); got != c.want {
			t.Errorf("%d of %d with limit %d, want %d", got, len(c.rest), c.limit, c.want)
		}
	}
}
