// SPDX-License-Identifier: Apache-2.0

package lbmap

// Usage is how full a table is.
type Usage struct {
	Used int `json:"used"`
	Max  int `json:"max"`
}
