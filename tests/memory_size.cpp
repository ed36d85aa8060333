// Prints the limit of this process's control groups, whose files are those below a folder, and how many ranks share it.
#include "cpu/machine/memory_size.h"

#include <iostream>

int main(int, char** arguments) {
  std::cout << wnfused::cpu::group_limit(arguments[1]) << ' ' << wnfused::cpu::local_ranks() << '\n';
}
