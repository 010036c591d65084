// SPDX-License-Identifier: Apache-2.0

package loading

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestValue: a value is shared by those who use it within a moment of each other, and made again later.
func TestValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		made, fails := 0, errors.New("fails")
		err := fails
		v := NewValue(func() (int, error) {
			if err == nil {
				made++
			}
			return made, err
		})
		if _, err := v.Get(); err != fails {
			t.Errorf("error %v, want that of the function", err)
		}
		err = nil
		get := func(after time.Duration, want int) {
			t.Helper()
			time.Sleep(after)
			synctest.Wait()
			if got, err := v.Get(); got != want || err != nil {
				t.Errorf("value %d made, error %v, want %d", got, err, want)
			}
		}
		get(0, 1)
		get(keepFor-1, 1)
		get(keepFor-1, 1) // since the last use
		get(keepFor, 2)
		get(keepFor-1, 2)
		time.Sleep(keepFor)
		synctest.Wait()
		if v.value != 0 || v.timer != nil {
			t.Error("the value is kept")
		}
	})
}
