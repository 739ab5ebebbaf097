package mailbox

import (
	"runtime"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestValuesAreTakenInTheirOrder(t *testing.T) {
	t.Parallel()
	b := New[int]()
	b.Put()
	select {
	case <-b.Ready():
		t.Fatal("nothing was put, and the box is ready")
	default:
	}

	b.Put(1, 2)
	b.Put(3, 4, 5)
	<-b.Ready()
	if got := b.Take(2); !slices.Equal(got, []int{1, 2}) {
		t.Errorf("took %v", got)
	}
	// A value that was taken counts until it is done.
	if b.Len() != 5 {
		t.Errorf("%d values, want 5", b.Len())
	}
	b.Done(2)

	// A slice that was taken belongs to the caller: later values do not overwrite it.
	rest := b.Take(0)
	b.Put(6)
	rest = append(rest, 9)
	if got := b.Take(10); !slices.Equal(got, []int{6}) || !slices.Equal(rest, []int{3, 4, 5, 9}) {
		t.Errorf("took %v and %v", rest, got)
	}
	if b.Done(4); b.Len() != 0 || len(b.Take(0)) != 0 {
		t.Errorf("%d values are left", b.Len())
	}
}

// No value is lost if many goroutines put while one takes, and the taker sleeps while nothing is there.
func TestNoValueIsLostOrOvertaken(t *testing.T) {
	t.Parallel()
	const senders, each = 8, 2000
	b := New[[2]int]()
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			for i := range each {
				b.Put([2]int{s, i})
			}
		})
	}

	next := [senders]int{}
	for taken := 0; taken < senders*each; {
		list := b.Take(100)
		if len(list) == 0 {
			<-b.Ready()
			continue
		}
		for _, v := range list {
			if v[1] != next[v[0]] {
				t.Fatalf("value %d of sender %d came, want %d", v[1], v[0], next[v[0]])
			}
			next[v[0]]++
		}
		taken += len(list)
		b.Done(len(list))
	}
	wg.Wait()
	if b.Len() != 0 {
		t.Errorf("%d values are left", b.Len())
	}
}

// A box that was emptied keeps no memory of its values.
func TestAnEmptyBoxKeepsNoMemory(t *testing.T) {
	t.Parallel()
	type large struct{ _ [1 << 20]byte }
	b := New[*large]()
	freed := make(chan struct{}, 8)
	for range 8 {
		v := &large{}
		runtime.AddCleanup(v, func(int) { freed <- struct{}{} }, 0)
		b.Put(v)
	}
	for range 8 {
		b.Take(1)
	}

	b.Done(8)
	for range 8 {
		for done := false; !done; {
			runtime.GC()
			select {
			case <-freed:
				done = true
			default:
			}
		}
	}
	runtime.KeepAlive(b)
}
